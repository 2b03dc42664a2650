"""``conserve bench``: measure an endpoint, or several against each other."""

import asyncio
import os
import re
import resource
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from conserve_cli.output import console, refuse
from conserve_lab.cli.output import can_draw, make_folder, progress_bar, show_notes
from conserve_lab.cli.workload_options import (
    ArrivalPattern,
    MaxContextTokens,
    MaxGap,
    MaxTurns,
    Preset,
    RecordedData,
    ScaleGaps,
    ScaleTokens,
    Seed,
    SkipBad,
    SloMultiple,
    Tokenizer,
)
from conserve_lab.client import Endpoint, EndpointError
from conserve_lab.compare import Comparison, labels, show_comparisons, write_comparisons
from conserve_lab.compare import compare as ratios_to_first
from conserve_lab.driver import DriveOptions, Progress
from conserve_lab.measure import Measurement, MeasurementSettings, OnProgress, Stopped, measure
from conserve_lab.records import RecordWriter, write_parquet
from conserve_lab.report import (
    Report,
    ReportError,
    read_report,
    seconds,
    show_run,
    show_side_by_side,
    write_report,
)
from conserve_lab.selection import DEFAULT_VOCABULARY, Selection
from conserve_lab.workloads import WorkloadError

cli = typer.Typer(
    help="Measure an OpenAI-compatible endpoint with conversations of agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_NAME = re.compile(r"[\w.+-]+")
_STOPPED = 130


@cli.command()
def run(
    endpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]URL...",
            help="One endpoint to measure, or several, which are then alternated in short rounds "
            "and compared with the first.",
        ),
    ],
    workload: Annotated[
        str, typer.Option(help="Kind of conversations: recorded, dialogues, synthetic or agents.")
    ] = "synthetic",
    data: RecordedData = None,
    skip_bad: SkipBad = None,
    tokenizer: Tokenizer = None,
    preset: Preset = None,
    conversations: Annotated[
        int, typer.Option(help="How many there are; with several rounds, in each round.")
    ] = 20,
    rate: Annotated[float, typer.Option(help="Conversations that arrive in a second.")] = 1.0,
    arrivals: ArrivalPattern = "poisson",
    concurrency: Annotated[
        int | None, typer.Option(help="At most this many conversations are open; the others wait.")
    ] = None,
    seed: Seed = 0,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST",
            help="Token ids that prompts are made of, without the model's special ones "
            f"(default: {DEFAULT_VOCABULARY}).",
        ),
    ] = None,
    scale_tokens: ScaleTokens = None,
    scale_gaps: ScaleGaps = None,
    max_gap: MaxGap = None,
    max_context_tokens: MaxContextTokens = None,
    max_turns: MaxTurns = None,
    mean_gap: Annotated[
        float | None,
        typer.Option(help="Mean gap between turns of dialogues and agents, in seconds."),
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Longest answer in dialogues, and of agents.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model to ask for (default: the first that the endpoint lists)."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:VALUE", help="Header to send with each request (an API key)."),
    ] = None,
    conversation_header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Header that carries the conversation's id."),
    ] = None,
    release: Annotated[
        bool, typer.Option(help="Tell the server when a conversation has ended.")
    ] = True,
    cache_salt: Annotated[
        bool, typer.Option(help="Keep apart, in the server's caches, what other runs left there.")
    ] = True,
    min_tokens: Annotated[
        bool, typer.Option(help="Force output lengths with min_tokens too, beside max_tokens.")
    ] = True,
    turn_timeout: Annotated[float, typer.Option(help="Seconds until a turn is given up.")] = 600,
    duration: Annotated[float | None, typer.Option(help="Stop after this many seconds.")] = None,
    rounds: Annotated[
        int, typer.Option(help="How many rounds there are with several endpoints.")
    ] = 5,
    unloaded: Annotated[
        int,
        typer.Option(
            help="This many conversations are run alone first, on the first endpoint; SLOs and "
            "goodput are relative to them. 0: no SLOs."
        ),
    ] = 3,
    reference: Annotated[
        Path | None, typer.Option(help="Take the unloaded latencies from this report instead.")
    ] = None,
    slo_multiple: SloMultiple = 5.0,
    kv_bytes_per_token: Annotated[
        float | None,
        typer.Option(
            help="Bytes of KV that a token takes in all layers; with it, reports say how many "
            "bytes were handed off."
        ),
    ] = None,
    core: Annotated[int | None, typer.Option(help="Pin this program to a core.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for reports, records and pictures.")
    ] = None,
    parquet: Annotated[bool, typer.Option("--parquet", help="Records as Parquet too.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw pictures.")] = True,
) -> None:
    """Measure one endpoint, or alternate between several and compare them."""
    _positive(
        turn_timeout=turn_timeout, duration=duration, slo_multiple=slo_multiple, rounds=rounds,
        concurrency=concurrency, kv_bytes_per_token=kv_bytes_per_token,
    )  # fmt: skip
    if unloaded < 0:
        refuse(f"--unloaded is {unloaded}; give a number from 0")
    try:
        selection = Selection.of(locals(), rate_per_s=rate)
        settings = MeasurementSettings(
            endpoints=_endpoints(
                endpoints, model, header, conversation_header, release, min_tokens
            ),
            selection=selection,
            options=DriveOptions(
                turn_timeout_s=turn_timeout,
                duration_s=duration,
                concurrency=concurrency,
                cache_salt=secrets.token_hex(4) if cache_salt else None,
                id_prefix=f"bench-{secrets.token_hex(3)}-",
            ),
            rounds=rounds,
            unloaded=0 if reference else unloaded,
            reference=read_report(reference) if reference else None,
            slo_multiple=slo_multiple,
            kv_bytes_per_token=kv_bytes_per_token,
        )
        settings.check()
        show_notes(selection.workload())
    except (WorkloadError, ReportError) as error:
        refuse(str(error))
    _prepare(core)
    folder = out or Path("bench-results") / datetime.now().strftime("%Y%m%d-%H%M%S")
    make_folder(folder)
    measured = _measure(settings, folder)
    _hand_out(measured, folder, parquet, plots)
    if measured.interrupted:
        if len(measured.reports) > 1:
            console.print("[yellow]Stopped:[/yellow] the reports are of the whole rounds alone.")
        raise typer.Exit(_STOPPED)
    idle = [r.system for r in measured.reports if not r.result.turns.get("completed")]
    if idle:
        console.print(f"[red]No turn was completed by {', '.join(idle)}.[/red]", highlight=False)
        raise typer.Exit(1)


@cli.command()
def compare(
    reports: Annotated[list[Path], typer.Argument(help="Reports; the first is the baseline.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the ratios as JSON, and for pictures; without: neither."),
    ] = None,
) -> None:
    """Put reports side by side, with ratios to the first one's system."""
    try:
        loaded = [read_report(path) for path in reports]
    except ReportError as error:
        refuse(str(error))
    if len(loaded) < 2:
        refuse("one report alone cannot be compared; give at least two")
    show_side_by_side(loaded, console, labels(loaded))
    comparisons = ratios_to_first(loaded)
    show_comparisons(comparisons, console)
    if out is not None:
        make_folder(out)
        write_comparisons(comparisons, out / "comparison.json")
        _draw(loaded, comparisons, out)


# --- Options --------------------------------------------------------------------------------------


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            refuse(f"--{name.replace('_', '-')} is {value:g}; give a number above 0")


def _endpoints(
    texts: list[str],
    model: str | None,
    headers: list[str] | None,
    conversation_headers: list[str] | None,
    release: bool,
    min_tokens: bool,
) -> list[Endpoint]:
    sent = {}
    for text in headers or ():
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            refuse(f"--header {text!r} is no header; write NAME:VALUE")
        sent[name.strip()] = value.strip()
    found = []
    for text in texts:
        named = re.fullmatch(r"([^=/]+)=(.*)", text)
        url = named[2] if named else text
        if not re.match(r"https?://[^/]", url):
            refuse(f"{text!r} is no endpoint; write http://HOST:PORT, or NAME=http://HOST:PORT")
        name = named[1] if named else re.sub(r"[^\w.+-]", "-", url.partition("://")[2].strip("/"))
        if not _NAME.fullmatch(name):
            refuse(f"{name!r} is no name for an endpoint; use letters, digits, and . _ + -")
        ids = tuple(conversation_headers or ("X-Conversation-Id",))
        url = url.rstrip("/").removesuffix("/v1")
        found.append(
            Endpoint(name, url, model, ids, headers=sent, release=release, min_tokens=min_tokens)
        )
    names = [endpoint.system for endpoint in found]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled:
        refuse(f"two endpoints are called {doubled}; name them: a=URL b=URL")
    return found


def _prepare(core: int | None) -> None:
    if core is not None:
        try:
            os.sched_setaffinity(0, {core})
        except OSError:
            usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            refuse(f"--core {core}: this program may use the cores {usable}")
    # Each open conversation may need a connection.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- Running, and what comes of it ----------------------------------------------------------------


def _measure(settings: MeasurementSettings, folder: Path) -> Measurement:
    with RecordWriter(folder / "records.jsonl") as writer, _progress() as show:
        try:
            return asyncio.run(_stoppable(settings, writer, show))
        except (EndpointError, ValueError) as error:
            refuse(str(error), 1)
        except Stopped:
            refuse("Stopped before there was anything to report.", _STOPPED)
        except KeyboardInterrupt:
            refuse(f"Ended at once; records so far are in {folder}.", _STOPPED)


async def _stoppable(
    settings: MeasurementSettings, writer: RecordWriter, show: OnProgress
) -> Measurement:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop(number: signal.Signals) -> None:
        stop.set()
        # The next such signal ends the program at once.
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask_to_stop, number)
    return await measure(settings, on_record=writer.write, on_progress=show, stop=stop)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show a bar of ended conversations; yield the `OnProgress` that updates it."""
    with progress_bar("state") as bar:
        task = bar.add_task("starting", total=None, state="")

        def show(what: str, conversations: int, progress: Progress) -> None:
            state = (
                f"{progress.open} open, {progress.turns} turns, "
                f"TTFT p50 {_shown(progress.ttft_p50_s)}, TTFET p50 {_shown(progress.ttfet_p50_s)}"
            )
            if progress.failures:
                state += f", [red]{progress.failures} failed[/red]"
            ended = progress.arrived - progress.open
            bar.update(task, description=what, total=conversations, completed=ended, state=state)

        yield show


def _shown(value_s: float | None) -> str:
    return "-" if value_s is None else seconds(value_s)


def _hand_out(measured: Measurement, folder: Path, parquet: bool, plots: bool) -> None:
    for report in measured.reports:
        write_report(report, folder / f"{report.system}.json")
    if parquet:
        records = [record for run in measured.runs for record in run.records]
        write_parquet(records, folder / "records.parquet")
    comparisons = ratios_to_first(measured.reports)
    if len(measured.reports) == 1:
        show_run(measured.reports[0], console)
    else:
        show_side_by_side(measured.reports, console)
        show_comparisons(comparisons, console)
        write_comparisons(comparisons, folder / "comparison.json")
    if plots:
        _draw(measured.reports, comparisons, folder)
    console.print(f"Reports and records are in {escape(str(folder))}.", highlight=False)


def _draw(reports: list[Report], comparisons: list[Comparison], folder: Path) -> None:
    if can_draw():
        from conserve_lab.plots import draw_all, draw_ratios

        draw_all(reports, labels(reports), folder)
        draw_ratios(comparisons, folder)
