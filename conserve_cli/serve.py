"""``conserve serve``: runs the application until it ends or is interrupted."""

from typing import Annotated

import typer
from rich.markup import escape

from conserve.settings import Settings
from conserve_cli.gpu_plan import examined, show_plan
from conserve_cli.launching import (
    ConfigFile,
    LogFile,
    SettingArguments,
    given,
    laid_out,
    launched,
    settings_from,
    wait_or_drain,
)
from conserve_cli.output import console, refuse

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def serve(
    settings: SettingArguments = None,
    config: ConfigFile = None,
    log: LogFile = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Check all that a start needs, and say what would run where; start nothing.",
        ),
    ] = False,
) -> None:
    """Start the application, say when it is ready, and stay until Ctrl-C.

    SIGTERM has it finish the turns that run, and take no new ones; a second signal ends it.
    """
    arguments = given(settings, config)
    chosen = settings_from(arguments)
    if plan:
        settled, layout = examined(chosen, planning=True)
        _say_parsers(chosen)
        show_plan(settled, layout)
        return
    settled = laid_out(chosen)
    _say_parsers(chosen)
    with launched(settled, arguments, log) as (application, url):
        names = [*chosen.each]
        served = f"model{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
        console.print(f"[bold green]Ready[/bold green] at {url}/v1, {escape(served)}:")
        curl = "curl --insecure" if chosen.tls.files else "curl"
        key = " -H 'Authorization: Bearer KEY'" if chosen.keys_file else ""
        model = f'"model": "{names[0]}", ' if len(names) > 1 else ""
        console.print(
            f"  {curl} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
            f"    -d '{{{model}"
            '"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}\'',
            highlight=False,
        )
        console.print("Ctrl-C ends it at once, SIGTERM once running turns have finished.")
        status = wait_or_drain(application, chosen.drain_timeout_s)
    if status:
        refuse(f"The application ended with status {status}.", 1)


def _say_parsers(settings: Settings) -> None:
    """Print which parsers read each model's tool calls and reasoning, and any problem with them."""
    # This import takes a second.
    from deployments.prompting import parsers_of

    for name, own in settings.each.items():
        chosen = parsers_of(own)
        said = chosen.said[0].upper() + chosen.said[1:]
        of = f"{name}: " if own.models else ""
        console.print(f"{escape(of + said)}.", highlight=False)
        if chosen.problem is not None:
            console.print(f"[yellow]{escape(of + chosen.problem)}[/yellow]", highlight=False)
