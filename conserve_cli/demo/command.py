"""The command: start the application, have agents work, show what they did, stop it all."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from conserve.console import new_console
from conserve_cli.demo.agents import converse
from conserve_cli.demo.demonstration import TurnRow, write_json
from conserve_cli.demo.report import report
from conserve_cli.launching import LogFile, launched
from conserve_cli.setting_arguments import SettingArguments, settings_from

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = new_console()


@cli.command()
def demo(
    settings: SettingArguments = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write what was seen to this file.")
    ] = None,
    conversations: Annotated[
        int, typer.Option(min=1, help="How many conversations run at the same time.")
    ] = 4,
    turns: Annotated[int, typer.Option(min=2, help="How many turns each has at least.")] = 4,
    log: LogFile = None,
) -> None:
    """Have a few agents work, and show where every prompt's KV came from."""
    chosen = settings_from(settings)
    with launched(chosen, settings or [], log) as (_, url):
        with console.status("running turns") as status:
            seen = 0

            def on_turn(row: TurnRow) -> None:
                nonlocal seen
                seen += 1
                status.update(f"running turns: {seen} done")
                if not console.is_terminal:
                    console.print(f"  {row.conversation}: turn {row.turn} done", highlight=False)

            outcome = asyncio.run(converse(url, chosen.model_id, conversations, turns, on_turn))
        report(outcome, console)
        console.print("Stopping every process.")
    if json_path is not None:
        write_json(outcome, json_path)
    wrong = outcome.verdict(
        conversations, turns, always_handed_off=chosen.placement == "conversation"
    )
    for problem in wrong:
        console.print(f"[red]Not as promised:[/red] {problem}")
    if wrong:
        raise typer.Exit(1)
    console.print("[bold green]Each conversation: one engine, and no KV moved twice.[/bold green]")
