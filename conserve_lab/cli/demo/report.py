"""Prints a demonstration as tables."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conserve_lab.cli.demo.seen import Demonstration, TurnRow


def report(seen: Demonstration, console: Console) -> None:
    """Print each turn, with its images and stages if there are any, and each agent's answer."""
    console.print(_turns(seen))
    images = (
        "enc: images that were encoded for this turn, on any engine; node: taken from the node's "
        "memory instead; the others were in their engine's own caches. "
    )
    again = "again: how often it was sent again, since its router had been killed. "
    console.print(
        f"{again if seen.again else ''}{images if seen.images else ''}own: found in the cache of "
        "the decoder that the turn ran on; LMCache: handed off; *: sends no conversation id."
    )
    if seen.staged:
        console.print()
        console.print(_stages(seen))
        console.print(
            "In its decoder's lane, beside others' answers: waits: until it had its images, less "
            "what it took to encode them, or to take them from the node (encode); prefill: of a "
            "long prompt."
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
    if seen.generated_tokens is not None:
        console.print(
            f"A router was killed while agents read from it: {_counted(seen.again, 'turn')} sent "
            f"again, {_counted(seen.rejoined, 'answer')} rejoined. Engines generated "
            f"{seen.generated_tokens:,} tokens of answers, {seen.twice_tokens} of them twice."
        )
    if seen.images:
        console.print(
            f"{_counted(seen.images, 'screen')}, {_counted(seen.shown_images, 'image')} in all "
            f"prompts: {seen.encoded_images} encoded, {seen.node_images} from the node's memory. "
            f"{seen.hits} of {_counted(seen.clicks, 'click')} on the highlighted button."
        )
    answers = Table("agent", "TTFET", "answer", box=box.SIMPLE_HEAD)
    for answer in seen.answers:
        ttfet = "-" if answer.ttfet_s is None else f"{answer.ttfet_s:.2f} s"
        text = escape(answer.text) if answer.right else f"[red]{escape(answer.text)}[/red] (wrong)"
        answers.add_row(_short(answer.conversation), ttfet, text)
    console.print(answers)


def _turns(seen: Demonstration) -> Table:
    what = "images and KV (in tokens) came from" if seen.images else "KV came from, in tokens"
    # The columns are narrow, so that what the agent does fits into 80 columns beside them.
    table = Table(
        title=f"Where each prompt's {what}; TTFT in ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0 if seen.images else (0, 1, 0, 0),
    )
    table.add_column("agent", no_wrap=True)
    images = ("images", "enc", "node") if seen.images else ()
    again = ("again",) if seen.again else ()
    for column in ("turn", *again, *images, "prompt", "own", "LMCache", "TTFT"):
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
            *([f"[bold]{row.again or '-'}[/bold]"] if again else ()),
            *(_images(row) if seen.images else ()),
            f"{row.prompt_tokens:,}",
            f"{row.decoder_cached_tokens:,}" if row.decoder_cached_tokens else "-",
            f"[bold]{row.lmcache_tokens:,}[/bold]" if row.lmcache_tokens else "-",
            f"{row.ttft_s * 1000:,.0f}",
            row.decoder[:4],
            escape(row.does),
        )
        last = row.conversation
    return table


def _stages(seen: Demonstration) -> Table:
    table = Table(title="Each turn's times by stage, in ms", title_justify="left",
                  box=box.SIMPLE_HEAD)  # fmt: skip
    table.add_column("agent", no_wrap=True)
    for column in ("turn", "waits", "encode", "prefill", "decode"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in seen.turns:
        if row.turn == 1 and table.rows:
            table.add_section()
        times_s = (row.encode_wait_s, row.encode_s, row.prefill_s, row.decode_s)
        cells = (f"{1000 * one:,.0f}" if one else "-" for one in times_s)
        table.add_row(_short(row.conversation) if row.turn == 1 else "", str(row.turn), *cells)
    return table


def _images(row: TurnRow) -> tuple[str, str, str]:
    encoded = f"[bold]{row.encoded_images}[/bold]" if row.encoded_images else "-"
    return str(row.images), encoded, str(row.node_images or "-")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _short(name: str) -> str:
    return name.replace(" (no id)", "*")


def _mean_ms(values_s: list[float]) -> str:
    return f"{sum(values_s) / len(values_s) * 1000:,.0f}"
