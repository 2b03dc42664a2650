"""A demonstration as a table, with what it comes to below."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conserve_cli.demo.demonstration import Demonstration


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
