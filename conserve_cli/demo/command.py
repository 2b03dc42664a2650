"""The command: start the application, have agents work, show what they did, stop it all."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conserve.console import new_console
from conserve_cli.demo.agents import converse
from conserve_cli.demo.demonstration import Demonstration, TurnRow, write_json
from conserve_cli.launching import LogFile, launched
from conserve_cli.setting_arguments import SettingArguments, settings_from


def report(seen: Demonstration, console: Console) -> None:
    """Print a row for each turn, and a summary."""
    table = Table(
        title="Where each prompt's KV came from, in tokens; TTFT in ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    # The columns are so narrow that what the agent does fits into 80 columns with them.
    table.add_column("agent", no_wrap=True)
    for column in ("turn", "prompt", "own", "LMCache", "TTFT"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("on", no_wrap=True)
    table.add_column("does", overflow="fold")
    last = None
    for row in seen.turns:
        if last not in (None, row.conversation):
            table.add_section()
        table.add_row(
            _short(row.conversation) if row.conversation != last else "",
            str(row.turn),
            f"{row.prompt_tokens:,}",
            f"{row.decoder_cached_tokens:,}" if row.decoder_cached_tokens else "-",
            f"[bold]{row.lmcache_tokens:,}[/bold]" if row.lmcache_tokens else "-",
            f"{row.ttft_s * 1000:,.0f}",
            row.decoder[:4],
            escape(row.does),
        )
        last = row.conversation
    console.print(table)
    console.print(
        "own: found in the cache of the decoder that the turn ran on; LMCache: handed off; "
        "*: sends no conversation id."
    )
    prompts = sum(row.prompt_tokens for row in seen.turns)
    computed = prompts - sum(row.decoder_cached_tokens + row.lmcache_tokens for row in seen.turns)
    first = [row.ttft_s for row in seen.turns if row.turn == 1]
    later = [row.ttft_s for row in seen.turns if row.turn > 1]
    conversations = len({row.conversation for row in seen.turns})
    console.print(
        f"{conversations} conversations, {len(seen.turns)} turns, "
        f"{_counted(seen.handoffs, 'handoff')}, {_counted(seen.moves, 'move')}, "
        f"{_counted(seen.errors, 'error')}. "
        f"Decoders computed {computed:,} of {prompts:,} prompt tokens."
    )
    if first and later:
        console.print(f"Mean TTFT: turn 1 {_mean_ms(first)} ms, later turns {_mean_ms(later)} ms.")
    answers = Table("agent", "TTFET", "answer", box=box.SIMPLE_HEAD)
    for answer in seen.answers:
        ttfet = "-" if answer.ttfet_s is None else f"{answer.ttfet_s:.2f} s"
        text = escape(answer.text) if answer.right else f"[red]{escape(answer.text)}[/red] (wrong)"
        answers.add_row(_short(answer.conversation), ttfet, text)
    console.print(answers)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _short(name: str) -> str:
    return name.replace(" (no id)", "*")


def _mean_ms(values_s: list[float]) -> str:
    return f"{sum(values_s) / len(values_s) * 1000:,.0f}"


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
        conversations, turns, always_handed_off=chosen.policy_class.only_first_prompts
    )
    for problem in wrong:
        console.print(f"[red]Not as promised:[/red] {problem}")
    if wrong:
        raise typer.Exit(1)
    console.print("[bold green]Each conversation: one engine, and no KV moved twice.[/bold green]")
