"""The command line: ``conserve serve``, ``demo``, ``bench``, ``plan``, ``doctor``, ..."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from conserve.launch import Launch, LaunchError, require_free
from conserve.settings import Settings, SettingsError, load
from conserve_cli.power import power

if TYPE_CHECKING:
    from conserve_cli.doctor.findings import Finding

cli = typer.Typer(
    help="ConServe: serve multi-turn agents, scheduled by the conversation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli.add_typer(power, name="power")
console = Console()

Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="Settings, as for `serve run conserve.app`: decoders=3 model=..."),
]
LogFile = Annotated[Path | None, typer.Option("--log", help="Where the application's log goes.")]


@cli.command()
def serve(settings: Arguments = None, log: LogFile = None) -> None:
    """Start the application, say when it is ready, and stay until Ctrl-C."""
    chosen = _settings(settings)
    with _launched(chosen, settings or [], log) as (application, url):
        console.print(f"[bold green]Ready[/bold green] at {url}/v1, model {chosen.model_id!r}:")
        console.print(
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            '    -d \'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}\'',
            highlight=False,
        )
        console.print("Ctrl-C ends it.")
        status = application.wait()
    if status:
        console.print(f"[red]The application ended with status {status}.[/red]")
        raise typer.Exit(1)


@cli.command()
def demo(
    settings: Arguments = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write what was seen to this file.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="At the same time.")] = 4,
    turns: Annotated[int, typer.Option(min=2, help="At least so many of each.")] = 4,
    log: LogFile = None,
) -> None:
    """Have a few agents work, and show where every prompt's KV came from."""
    from conserve_cli import demo as show

    chosen = _settings(settings)
    with _launched(chosen, settings or [], log) as (_, url):
        with console.status("running turns") as status:
            seen = 0

            def on_turn(row: show.TurnRow) -> None:
                nonlocal seen
                seen += 1
                status.update(f"running turns: {seen} done")
                if not console.is_terminal:
                    console.print(f"  {row.conversation}: turn {row.turn} done", highlight=False)

            outcome = asyncio.run(
                show.converse(url, chosen.model_id, conversations, turns, on_turn)
            )
        show.report(outcome, console)
        console.print("Stopping every process.")
    if json_path is not None:
        show.write_json(outcome, json_path)
    wrong = outcome.verdict(conversations, turns)
    for problem in wrong:
        console.print(f"[red]Not as promised:[/red] {problem}")
    if wrong:
        raise typer.Exit(1)
    console.print("[bold green]Each conversation: one handoff, one decoder.[/bold green]")


# Its options are its own, --help included.
@cli.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def bench(context: typer.Context) -> None:
    """Measure endpoints, and compare reports; see its own --help."""
    # Not for those who only serve.
    from conserve_cli.bench import bench as application

    application(args=context.args, prog_name=context.command_path)


@cli.command()
def doctor(
    settings: Arguments = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="A Ray cluster, whose nodes are examined; `auto`: the one on this machine.",
        ),
    ] = None,
) -> None:
    """Say what is wrong with this machine, or with a cluster, and what to do about it.

    One line a finding; the exit status is 1 if something is wrong.
    """
    from conserve_cli.doctor.findings import exit_status
    from conserve_cli.doctor.report import line

    chosen = _settings(settings)
    with console.status("looking at this machine") as status:
        findings = _examined(chosen, address, status.update)
    for finding in findings:
        console.print(line(finding), highlight=False, soft_wrap=True)
    raise typer.Exit(exit_status(findings))


def _examined(
    settings: Settings, address: str | None, on_progress: Callable[[str], None]
) -> "list[Finding]":
    # Imports psutil and NVML, and on a cluster Ray: not for those who only serve.
    if address is None:
        from conserve_cli.doctor.observe import observe_node
        from conserve_cli.doctor.verdict import judge

        return judge(settings, [observe_node(settings)])
    # Ray tries twelve times, for eight minutes; it reads this when it is imported.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    from conserve_cli.doctor.examine import examine_cluster

    try:
        return examine_cluster(settings, address, on_progress)
    except ConnectionError as error:
        console.print(f"[red]No Ray cluster at {escape(address)}: {escape(str(error))}[/red]")
        raise typer.Exit(2) from None


@cli.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def profile(context: typer.Context) -> None:
    """Measure a running application's engines, and write their profile; see its own --help."""
    from conserve_cli.profile.command import profiling as application

    application(args=context.args, prog_name=context.command_path)


@cli.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def plan(context: typer.Context) -> None:
    """Plan prefillers and decoders from a profile and a workload; see its own --help."""
    from conserve_cli.plan import planning as application

    application(args=context.args, prog_name=context.command_path)


@cli.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def simulate(context: typer.Context) -> None:
    """Simulate a cluster on engines that a profile describes; see its own --help."""
    from conserve_cli.simulate.command import simulation as application

    application(args=context.args, prog_name=context.command_path)


@contextlib.contextmanager
def _launched(
    settings: Settings, arguments: list[str], log: Path | None
) -> Iterator[tuple[Launch, str]]:
    path = log or Path(tempfile.gettempdir()) / f"conserve-{os.getpid()}.log"
    url = f"http://{_reachable(settings.host)}:{settings.port}"
    started_s = time.monotonic()
    # A plain `kill`, or a closed terminal, ends it as Ctrl-C does, with all that it started.
    signals = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, _interrupt) for number in signals}
    try:
        require_free(url)
        with Launch(arguments, path) as application:
            try:
                _wait(application, settings, url)
                console.print(f"Serving after {time.monotonic() - started_s:.0f} s (log: {path}).")
                yield application, url
            except KeyboardInterrupt:
                console.print("Stopping.")
                raise typer.Exit(130) from None
    except LaunchError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(1) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(application: Launch, settings: Settings, url: str) -> None:
    last = ""
    with console.status("starting") as status:

        def on_progress(text: str) -> None:
            nonlocal last
            status.update(text)
            if text != last and not console.is_terminal:
                console.print(f"  {text}")
            last = text

        application.wait_until_serving(
            url,
            settings.prefiller_replicas,
            settings.decoders.replicas,
            timeout_s=1800,
            on_progress=on_progress,
        )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _settings(arguments: list[str] | None) -> Settings:
    pairs = [argument.partition("=") for argument in arguments or []]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        console.print(f"[red]{bad[0]!r} is not a setting; write name=value.[/red]")
        raise typer.Exit(2)
    try:
        return load({name: value for name, _, value in pairs})
    except SettingsError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the ``conserve`` command."""
    cli()


if __name__ == "__main__":
    main()
