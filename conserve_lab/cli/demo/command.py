"""The command: starts the application, runs agents, and shows what was seen."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from conserve_cli.launching import LogFile, laid_out, launched, settings_from
from conserve_cli.output import console
from conserve_lab.cli.demo.agents import converse
from conserve_lab.cli.demo.kill import RouterKill
from conserve_lab.cli.demo.report import report
from conserve_lab.cli.demo.seen import TurnRow, write_json

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_VISION = "vision"


@cli.command()
def demo(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings, as for `serve run conserve.app`: decoders=3 model=...; and the word "
            "vision, for agents that look at screenshots."
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write what was seen to this file.")
    ] = None,
    conversations: Annotated[
        int, typer.Option(min=1, help="How many conversations run at the same time.")
    ] = 4,
    turns: Annotated[int, typer.Option(min=2, help="How many turns each has at least.")] = 4,
    kill_router: Annotated[
        bool, typer.Option(help="Have two routers, and kill one while agents read from it.")
    ] = False,
    log: LogFile = None,
) -> None:
    """Have a few agents work, and show where every prompt's KV came from."""
    arguments = [setting for setting in settings or [] if setting != _VISION]
    seeing = _VISION in (settings or [])
    if seeing and not any(argument.startswith("model=") for argument in arguments):
        arguments.append("model=embedded-vision")
        # For the times by stage. Not every other model, or set-up, can use the lane.
        if not any(argument.startswith("engine_scheduler=") for argument in arguments):
            arguments.append("engine_scheduler=conversation_lane")
    if kill_router and not any(argument.startswith("routers=") for argument in arguments):
        arguments.append("routers=2")
    chosen = settings_from(arguments)
    with launched(laid_out(chosen), arguments, log) as (_, url):
        with console.status("running turns") as status:
            seen = 0

            def on_turn(row: TurnRow) -> None:
                nonlocal seen
                seen += 1
                status.update(f"running turns: {seen} done")
                if not console.is_terminal:
                    console.print(f"  {row.conversation}: turn {row.turn} done", highlight=False)

            # By then most agents are in their first turns.
            kill = RouterKill(chosen.port, after=(conversations + 1) // 2) if kill_router else None
            conversing = converse(
                url, chosen.model_id, conversations, turns, on_turn, seeing=seeing, kill=kill
            )
            outcome = asyncio.run(conversing)
        report(outcome, console)
        console.print("Stopping every process.")
    if json_path is not None:
        write_json(outcome, json_path)
    wrong = outcome.verdict(
        conversations,
        turns,
        always_handed_off=chosen.policy_class.only_first_prompts,
        encoded_once=seeing and chosen.nodes != "several",
    )
    for problem in wrong:
        console.print(f"[red]Not as promised:[/red] {problem}")
    if wrong:
        raise typer.Exit(1)
    kept = "Each image: encoded once. " if seeing else ""
    kept += "Each answer: whole, and computed once. " if kill_router else ""
    console.print(
        f"[bold green]{kept}Each conversation: one engine, and no KV moved twice.[/bold green]"
    )
