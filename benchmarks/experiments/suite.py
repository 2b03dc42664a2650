"""Compares ConServe with its peers on one machine: the same engines, conversations and arrivals.

    python -m benchmarks.experiments.suite --data traces    # recorded agent sessions
    python -m benchmarks.experiments.suite                  # synthetic ones, as the paper's

One system at a time is started (`benchmarks.peers`), measured (`conserve bench run`) and stopped.
ConServe comes first: it gives the unloaded reference that all bounds are relative to, and the
highest rate: how many first turns a second its prefiller gets done, one after the other. Every
system then gets the same conversations at shares of that rate, the last of them the whole of it,
with evenly spaced arrivals, as the paper's saturation point has it (section 5.2).

It ends with a table for each rate, ``results.md`` with the same, and pictures.
"""

import asyncio
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from benchmarks.client import Endpoint, EndpointError, with_model
from benchmarks.console import new_console
from benchmarks.driver import DriveOptions, unloaded
from benchmarks.metrics import Result
from benchmarks.peers import PEERS, Options, Peer, PeerUnavailable, start
from benchmarks.plots import draw_all
from benchmarks.records import Answer, Script, TurnRequest
from benchmarks.report import Report, read_report
from benchmarks.selection import Selection
from benchmarks.workloads import Workload, WorkloadError

SYSTEMS = (
    "conserve",
    "collocated",
    "per_turn",
    "full_disaggregation",
    "ray_serve_llm",
    "ray_pd",
    "vllm",
)
# First conversations cost an engine more than later ones; these come before the measurement.
_WARM_UP_CONVERSATIONS = 2
_WARM_UP_SEED_SHIFT = 500_009

console = new_console()
cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A system that could not be measured, and why."""

    system: str
    why: str


@cli.command()
def main(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of recorded sessions; without it they are synthetic."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for everything that comes of it.")] = Path(
        "bench-results/suite"
    ),
    systems: Annotated[
        str, typer.Option(help="Which systems to measure, with commas between.")
    ] = ",".join(SYSTEMS),
    conversations: Annotated[int, typer.Option(help="Conversations in a run.", min=1)] = 60,
    shares: Annotated[
        str,
        typer.Option(help="Rates, as rising shares of the highest that the prefiller sustains."),
    ] = "0.5,1.0",
    engines: Annotated[int, typer.Option(help="Engine replicas of each system.", min=2)] = 2,
    cores: Annotated[
        str | None, typer.Option(metavar="0,1", help="Cores to pin engines to, one each.")
    ] = None,
    wrong_decision_rates: Annotated[
        str,
        typer.Option(
            help="Shares of wrong decisions; per_turn is measured with each (per_turn-10: 0.1)."
        ),
    ] = "0.1",
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Most tokens that a step of a collocated engine may have.")
    ] = None,
    scale_tokens: Annotated[
        float | None,
        typer.Option(
            help="Multiply lengths by this (default: 0.02 for recorded sessions, else 0.15)."
        ),
    ] = None,
    scale_gaps: Annotated[
        float, typer.Option(help="Multiply the gaps between turns by this.")
    ] = 0.02,
    max_gap: Annotated[
        float, typer.Option(help="Cut longer recorded gaps down to this, in seconds.")
    ] = 1.0,
    max_turns: Annotated[
        int, typer.Option(help="Leave recorded sessions with more turns out.")
    ] = 15,
    vocabulary: Annotated[str, typer.Option(help="See conserve bench run.")] = "1000:4000",
    model: Annotated[str, typer.Option(help="Path or id of the model.")] = "embedded",
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")] = 0,
) -> None:
    """Measure each system and compare them."""
    begun_s = time.monotonic()
    try:
        chosen = _names(systems)
        loads = _numbers("shares", shares)
        wrong_rates = _numbers("wrong-decision-rates", wrong_decision_rates)
        options = Options(
            engines=engines,
            model=model,
            cores=None if cores is None else tuple(int(core) for core in cores.split(",")),
            chunk_tokens=chunk_tokens,
        )
        selection = Selection(
            kind="recorded" if data else "synthetic",
            conversations=conversations,
            pattern="even",
            seed=seed,
            data=data,
            preset=None if data else "conserve",
            vocabulary=vocabulary,
            scale_tokens=scale_tokens or (0.02 if data else 0.15),
            scale_gaps=scale_gaps,
            max_gap_s=max_gap if data else None,
            max_turns=max_turns if data else None,
            max_context_tokens=16_000,
        )
        variants = _variants(chosen, wrong_rates, options)
        selection.workload()
        out.mkdir(parents=True, exist_ok=True)
        reports: list[Report] = []
        missing: list[Unavailable] = []
        for found in _measure_all(variants, loads, selection, out):
            if isinstance(found, Unavailable):
                missing.append(found)
            else:
                reports.append(found)
            # Written after each system, so that a stop loses nothing.
            text = results(reports, missing)
            (out / "results.md").write_text(text)
    except (WorkloadError, ValueError, OSError) as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(2) from None
    except (PeerUnavailable, EndpointError) as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(1) from None
    draw_all(reports, [f"{r.system} at {r.rate_per_s:.3g}/s" for r in reports], out)
    console.print(text, markup=False, highlight=False)
    minutes = (time.monotonic() - begun_s) / 60
    console.print(f"{minutes:.1f} minutes; reports and pictures are in {out}", highlight=False)


# --- Measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """A system as it is measured: its name in reports, the peer, and how that is started."""

    name: str
    peer: str
    options: Options


def _variants(systems: list[str], wrong_rates: list[float], options: Options) -> list[Variant]:
    found = []
    for system in systems:
        if system != "per_turn":
            found.append(Variant(system, system, options))
            continue
        for rate in wrong_rates:
            own = replace(options, wrong_decision_rate=rate)
            found.append(Variant(f"{system}-{100 * rate:g}", system, own))
    return found


def _measure_all(
    variants: list[Variant], loads: list[float], selection: Selection, out: Path
) -> Iterator[Report | Unavailable]:
    reference: Path | None = None
    highest_per_s = 0.0
    for variant in variants:
        name = variant.name
        console.rule(name)
        try:
            with start(variant.peer, variant.options, _tell) as peer:
                started = json.dumps(peer.described, indent=2) + "\n"
                (out / f"{name}.started.json").write_text(started)
                if reference is None:
                    highest_per_s = asyncio.run(_sustained_rate(peer, selection))
                    _tell(f"the prefiller gets {highest_per_s:.3g} conversations/s done")
                _warm_up(peer, selection, out)
                for load in loads:
                    rate_per_s = load * highest_per_s
                    path = _measure(name, peer, selection, rate_per_s, reference, out)
                    yield read_report(path)
                    reference = reference or path
        except (PeerUnavailable, subprocess.CalledProcessError) as error:
            why = str(error)
            if isinstance(error, subprocess.CalledProcessError):
                why = f"conserve bench run ended with status {error.returncode}; see what it said"
            if reference is None:
                raise PeerUnavailable(f"{name}, which all is relative to: {why}") from None
            console.print(f"[red]{escape(why)}[/red]", highlight=False)
            yield Unavailable(name, why)


def _tell(text: str) -> None:
    console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)


class _FirstTurn:
    """A conversation that ends with its first turn, one token long."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.conversation = script.conversation

    def next(self, answer: Answer | None) -> TurnRequest | None:
        turn = None if answer is not None else self._script.next(None)
        if turn is None:
            return None
        body = turn.body
        return replace(
            turn,
            body=lambda: {**body(), "min_tokens": 1, "max_tokens": 1},
            output_tokens=1,
        )


async def _sustained_rate(peer: Peer, selection: Selection) -> float:
    """Sessions a second whose first turns, sub-agents' included, ConServe gets done in a row."""
    endpoint = await with_model(_endpoint(peer))
    # These are the very conversations that are measured later: others' prompts have another mean
    # length.
    workload: Workload = selection.workload()
    salted = DriveOptions(cache_salt=f"rate-{time.time_ns()}", id_prefix="rate-")
    # The first ones also pay for what engines do once.
    for part, count in (("warm", _WARM_UP_CONVERSATIONS), ("measured", None)):
        options = replace(salted, cache_salt=f"{salted.cache_salt}-{part}", id_prefix=f"{part}-")
        scripts = (_FirstTurn(script) for _, script in islice(workload, count))
        run = await unloaded(endpoint, scripts, options)
    done = [turn for turn in run.records if turn.outcome == "completed"]
    if len(done) < len(run.records) or not done:
        raise PeerUnavailable("first turns failed while the prefiller's rate was measured")
    mean_s = sum(turn.ended_s - turn.sent_s for turn in done) / len(done)
    agents = workload.counts["conversations"] / selection.conversations
    return 1 / (mean_s * agents)


def _endpoint(peer: Peer) -> Endpoint:
    return Endpoint(peer.name, peer.url, peer.model, min_tokens=peer.min_tokens)


def _warm_up(peer: Peer, selection: Selection, out: Path) -> None:
    """Run some conversations that do not count."""
    warming = replace(
        selection,
        seed=selection.seed + _WARM_UP_SEED_SHIFT,
        conversations=_WARM_UP_CONVERSATIONS,
        pattern="together",
        scale_gaps=0.0,
    )
    _bench("warm-up", peer, warming, None, ["--unloaded", "0", "--no-plots"], out / "warm-up")


def _measure(
    name: str,
    peer: Peer,
    selection: Selection,
    rate_per_s: float,
    reference: Path | None,
    out: Path,
) -> Path:
    folder = out / f"{name}-at-{rate_per_s:.3g}"
    more = ["--no-plots", "--turn-timeout", "120"]
    more += ["--unloaded", "5"] if reference is None else ["--reference", str(reference)]
    _bench(name, peer, selection, rate_per_s, more, folder)
    return next(path for path in folder.glob("*.json") if path.name != "comparison.json")


def _bench(
    name: str,
    peer: Peer,
    selection: Selection,
    rate_per_s: float | None,
    more: list[str],
    folder: Path,
) -> None:
    command = ["bench", "run", f"{name}={peer.url}", "--out", str(folder), *more]
    if rate_per_s is not None:
        command += ["--rate", f"{rate_per_s:.4g}"]
    named = {"kind": "workload", "pattern": "arrivals", "max_gap_s": "max_gap"}
    for field, value in asdict(selection).items():
        if value is not None and field != "rate_per_s":
            command += [f"--{named.get(field, field).replace('_', '-')}", str(value)]
    if peer.session_header:
        command += ["--conversation-header", peer.session_header]
    if not peer.min_tokens:
        command += ["--no-min-tokens"]
    _tell(f"conserve {shlex.join(command)}")
    subprocess.run([sys.executable, "-m", "conserve_cli.main", *command], check=True)


# --- What came of it -----------------------------------------------------------------------------


def results(reports: list[Report], missing: list[Unavailable]) -> str:
    """The comparison as Markdown: a table for each rate."""
    lines = []
    for rate_per_s in sorted({report.rate_per_s or 0.0 for report in reports}):
        of_rate = [report for report in reports if report.rate_per_s == rate_per_s]
        lines += [f"At {rate_per_s:.3g} conversations/s:", "", *_table(of_rate), ""]
    lines += [f"- {one.system} was not measured: {one.why}" for one in missing]
    return "\n".join(lines)


_COLUMNS = (
    ("TTFET, s", "ttfet_less_gaps"),
    ("last-turn TBT, ms", "last_tbt"),
    ("end to end, s", "e2e_less_gaps"),
)


def _table(reports: list[Report]) -> Iterator[str]:
    heads = ["system", *(f"{head}: p50 / p95" for head, _ in _COLUMNS)]
    heads += ["over SLO: TTFET / last TBT / end to end", "failed turns"]
    heads += ["tokens handed off a conversation"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for report in reports:
        yield "| " + " | ".join(_row(report.system, report.result)) + " |"


def _row(system: str, result: Result) -> Iterator[str]:
    yield system
    for head, metric in _COLUMNS:
        found = result.latencies.get(metric)
        factor = 1000 if head.endswith("ms") else 1
        yield f"{factor * found.p50:.3g} / {factor * found.p95:.3g}" if found else "none"
    over = [result.violations.get(metric) for _, metric in _COLUMNS]
    yield " / ".join("not available" if share is None else f"{share:.0%}" for share in over)
    yield f"{sum(result.failures.values())}"
    moved = result.server.handoff_tokens_per_conversation
    yield "not available" if moved is None else f"{moved:,.0f}"


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"systems: no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    # ConServe comes first, because everything is relative to it.
    return ["conserve", *(name for name in names if name != "conserve")]


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not numbers with commas between") from None
    if not all(number >= 0 for number in numbers):
        raise ValueError(f"{option}: {text!r} has a number below 0")
    return numbers


if __name__ == "__main__":
    cli()
