"""A run's report: everything about it in one JSON file, and tables for the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from conserve_lab.counters import server_figures
from conserve_lab.driver import Run
from conserve_lab.latencies import LABELS, Samples, samples
from conserve_lab.machine import environment
from conserve_lab.metrics import Result, evaluate
from conserve_lab.objectives import Objectives, Reference
from conserve_lab.rounds import Alternation, told

_FORMAT = 1
_DIGITS = 6

NOT_AVAILABLE = "not available"


class ReportError(ValueError):
    """A file is not a report; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Report:
    """One system's run, as it is written and read.

    Attributes:
        workload: its name, options, seed and counts; equal where two runs had the same
            conversations.
        arrivals: pattern, ``rate_per_s`` (None where there is none) and ``concurrency``.
        environment: `conserve_lab.machine.environment`, and ``alternation``, where systems took
            turns.
        samples: every latency by conversation, seconds.
        unloaded: the reference that bounds and goodput are relative to.
        unloaded_violations: by how much the unloaded run itself violates the bounds.
        driver: lag, and what was odd about the run.
    """

    system: str
    workload: dict[str, Any]
    arrivals: dict[str, Any]
    options: dict[str, Any]
    environment: dict[str, Any]
    result: Result
    samples: Samples
    objectives: Objectives | None = None
    unloaded: Reference | None = None
    unloaded_violations: dict[str, float] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    format: int = _FORMAT

    @property
    def rate_per_s(self) -> float | None:
        rate: float | None = self.arrivals.get("rate_per_s")
        return rate


def make_report(
    run: Run,
    *,
    workload: dict[str, Any],
    arrivals: dict[str, Any],
    options: dict[str, Any],
    unloaded: Reference | None = None,
    unloaded_violations: dict[str, float] | None = None,
    slo_multiple: float = 5.0,
    kv_bytes_per_token: float | None = None,
    alternation: Alternation | None = None,
) -> Report:
    """Report everything about a run; arguments are as in `Report` and `MeasurementSettings`."""
    objectives = Objectives.from_reference(unloaded, slo_multiple) if unloaded else None
    seen = {
        metric: {
            conversation: [round(value, _DIGITS) for value in values]
            for conversation, values in found.items()
        }
        for metric, found in samples(run.records).items()
    }
    return Report(
        system=run.system,
        workload=workload,
        arrivals=arrivals,
        options=options,
        environment=environment()
        | {"alternation": None if alternation is None else alternation.describe()},
        result=evaluate(
            run.records,
            objectives,
            unloaded,
            energy_j=run.energy_j,
            server=server_figures(run.counters, run.arrived, kv_bytes_per_token),
        ),
        samples=seen,
        objectives=objectives,
        unloaded=unloaded,
        unloaded_violations=unloaded_violations or {},
        driver={
            "lag": run.lag,
            "wall_s": run.wall_s,
            "conversations_arrived": run.arrived,
            "interrupted": run.interrupted,
            "wrong_lengths": run.wrong_lengths,
            "not_released": run.not_released,
        },
        warnings=list(_warnings(run)),
    )


def _warnings(run: Run) -> Iterable[str]:
    failed = sum(record.outcome in ("failed", "timeout") for record in run.records)
    if failed:
        yield (
            f"{failed} of {len(run.records)} turns failed. Latencies are of those that completed; "
            "over SLO, goodput and the pictures count the failed ones."
        )
    if (lagged := run.lag.warning()) is not None:
        yield lagged
    if run.interrupted:
        yield "The run was stopped before all conversations had ended; what was open is unfinished."
    if run.wrong_lengths:
        yield (
            f"{run.wrong_lengths} answers have another length than was forced: this server does "
            "not keep to min_tokens, max_tokens and ignore_eos."
        )
    if run.not_released:
        yield (
            f"The end of {run.not_released} conversations could not be told to the server; "
            "they count as live there until their idle time."
        )


# --- Files ----------------------------------------------------------------------------------------


def write_report(report: Report, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(report) + b"\n")


def read_report(path: Path) -> Report:
    """Read what `write_report` wrote; ReportError: the file cannot be read, or is no report."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        said = " ".join(str(error).split())
        raise ReportError(f"{path} is no report of conserve bench: {said}") from None
    if report.format != _FORMAT:
        raise ReportError(f"{path} has format {report.format}; this version reads {_FORMAT}")
    return report


# --- Tables ---------------------------------------------------------------------------------------


def show_run(report: Report, console: Console) -> None:
    result = report.result
    table = Table(title=f"{report.system}: latencies", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("n", "gmean", "p50", "p95", "p99", "SLO", "over it"):
        table.add_column(heading, justify="right", no_wrap=True)
    bounds = report.objectives.bounds_s if report.objectives else {}
    for metric, summary in result.latencies.items():
        bound_s, over = bounds.get(metric), result.violations.get(metric)
        table.add_row(
            LABELS[metric],
            f"{summary.count:,}",
            *(seconds(s) for s in (summary.gmean, summary.p50, summary.p95, summary.p99)),
            "" if bound_s is None else seconds(bound_s),
            "" if over is None else f"{over:.1%}",
        )
    console.print(table)
    console.print(_facts_table([report], [""], f"{report.system}: work done"))
    _say_warnings([report], [report.system], console)


def show_side_by_side(
    reports: Sequence[Report], console: Console, labels: Sequence[str] | None = None
) -> None:
    """Print several runs, each in a column under its label (None: its system)."""
    names = labels or [report.system for report in reports]
    table = Table(title="latencies", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for metric, label in LABELS.items():
        found = [report.result.latencies.get(metric) for report in reports]
        if not any(found):
            continue
        for shown, part in ((label, "gmean"), ("", "p50"), ("", "p95"), ("", "p99")):
            cells = ["" if s is None else seconds(getattr(s, part)) for s in found]
            table.add_row(shown, part, *cells, end_section=part == "p99")
    console.print(table)
    console.print(_facts_table(reports, names, "work done"))
    turns = [told(report.environment.get("alternation")) for report in reports]
    for sentence in dict.fromkeys(turn for turn in turns if turn):
        console.print(sentence, markup=False, highlight=False)
    _say_warnings(reports, names, console)


def _facts_table(reports: Sequence[Report], names: Sequence[str], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=len(reports) > 1)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_facts(report) for report in reports]
    # All that any of them has, in the order in which they come.
    for fact in dict.fromkeys(fact for column in columns for fact in column):
        # Names of servers and words of errors are theirs.
        table.add_row(escape(fact), *(column.get(fact, "") for column in columns))
    return table


def _facts(report: Report) -> dict[str, str]:
    result = report.result
    turns, conversations = result.turns, result.conversations
    rate, pattern = report.rate_per_s, str(report.arrivals.get("pattern", ""))
    facts = {
        "arrivals of conversations": f"{pattern}, {rate:g}/s" if rate else pattern,
        "conversations completed": f"{conversations.get('completed', 0):,}",
        "conversations failed": f"{conversations.get('failed', 0):,}",
        "conversations unfinished": f"{conversations.get('unfinished', 0):,}",
        "turns completed": f"{turns.get('completed', 0):,}",
        "turns failed": f"{turns.get('failed', 0):,}",
        "turns timed out": f"{turns.get('timeout', 0):,}",
        "turns unfinished": f"{turns.get('unfinished', 0):,}",
        "duration": seconds(result.duration_s),
        "output tokens/s": f"{result.output_tokens_per_s:,.1f}",
        "prompt and output tokens/s": f"{result.total_tokens_per_s:,.1f}",
        "turns/min": f"{result.turns_per_min:,.1f}",
        "conversations/min": f"{result.conversations_per_min:,.2f}",
        "prompt tokens found in caches": _percent(result.cached_share),
        "prompt tokens that were sent before": _percent(result.reusable_share),
        "sessions within TTFT and TBT SLO": _percent(result.attainment),
    }
    for metric, over in result.violations.items():
        floor = report.unloaded_violations.get(metric)
        unloaded = f" (unloaded {floor:.1%})" if floor else ""
        facts[f"over SLO: {LABELS[metric]}"] = f"{over:.1%}{unloaded}"
    for slack, per_s in result.goodput.items():
        facts[f"goodput/min, slack {slack}"] = f"{per_s * 60:,.2f}"
    if result.without_effective:
        facts["conversations without output for the user"] = str(result.without_effective)
    for kind, count in sorted(result.failures.items(), key=lambda item: -item[1]):
        facts[f"failure: {kind}"] = str(count)
    for server, count in sorted(result.servers.items()):
        facts[f"turns on {server}"] = str(count)
    return facts | _server_facts(result) | {
        "energy of the GPUs": _number(result.energy_j, ",.0f", " J"),
        "output tokens/J": _number(result.output_tokens_per_j, ".3f"),
    }  # fmt: skip


def _server_facts(result: Result) -> dict[str, str]:
    server = result.server
    facts = {
        "tokens handed off a conversation": _number(server.handoff_tokens_per_conversation, ",.0f"),
        "KV handed off": _size(server.handoff_bytes),
        "engines' own prefix caches, found": _percent(server.prefix_cache_share),
    }
    if server.handoffs is not None:
        facts["handoffs"] = f"{server.handoffs:,.0f}"
    if server.cold_prefill_tokens is not None:
        facts["tokens prefilled on prefillers"] = f"{server.cold_prefill_tokens:,.0f}"
    if server.shared_found_tokens:
        facts["prompt tokens found that others share"] = f"{server.shared_found_tokens:,.0f}"
    if server.moves is not None:
        facts["conversations moved"] = f"{server.moves:,.0f}"
    for term, share in server.kv_shares.items():
        facts[f"KV space over time, {term}"] = _percent(share)
    for tier, joules in server.tier_energy_j.items():
        facts[f"energy of tier {tier}"] = f"{joules:,.0f} J"
    for tier, tokens_per_j in server.tier_tokens_per_j.items():
        facts[f"tokens computed/J on tier {tier}"] = f"{tokens_per_j:.3f}"
    return facts


def _say_warnings(reports: Sequence[Report], names: Sequence[str], console: Console) -> None:
    for name, report in zip(names, reports, strict=True):
        for warning in report.warnings:
            console.print(f"[yellow]{name}:[/yellow] {escape(warning)}", highlight=False)


def seconds(value_s: float) -> str:
    """Show a time as a person reads it, in milliseconds below one second."""
    return f"{value_s * 1e3:.1f} ms" if value_s < 1 else f"{value_s:,.2f} s"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return NOT_AVAILABLE if value is None else f"{value:{form}}{unit}"


def _size(value_bytes: float | None) -> str:
    return NOT_AVAILABLE if value_bytes is None else decimal(round(value_bytes))


def _percent(share: float | None) -> str:
    return NOT_AVAILABLE if share is None else f"{share:.1%}"
