"""Writes what the comparison says, as Markdown."""

from collections.abc import Iterable, Iterator

from conserve_lab.compare import Comparison
from conserve_lab.metrics import Result
from conserve_lab.report import Report
from conserve_lab.rounds import told
from experiments.suite.turns import Measured, Unavailable

_COLUMNS = (
    ("TTFET, s", "ttfet_less_gaps"),
    ("first turns' TTFT, s", "ttft_first"),
    ("later turns' TTFT, ms", "ttft_later"),
    ("TBT, ms", "tbt"),
    ("last-turn TBT, ms", "last_tbt"),
    ("end to end, s", "e2e_less_gaps"),
)
_OVER_SLO = ("ttfet_less_gaps", "last_tbt", "e2e_less_gaps")
_RATIOS = (
    ("TTFET p50", "ttfet_less_gaps", "p50"),
    ("TTFET p95", "ttfet_less_gaps", "p95"),
    ("first turns' TTFT mean", "ttft_first", "gmean"),
    ("later turns' TTFT mean", "ttft_later", "gmean"),
    ("TBT p95", "tbt", "p95"),
    ("last-turn TBT p95", "last_tbt", "p95"),
    ("end to end p50", "e2e_less_gaps", "p50"),
    ("end to end p95", "e2e_less_gaps", "p95"),
)


def results(found: Iterable[Measured], missing: Iterable[Unavailable]) -> str:
    """The comparison: of each group how it was measured, and for each rate figures and ratios."""
    lines = []
    for measured in found:
        lines += [*_how(measured), ""]
        for reports, comparisons in zip(measured.reports, measured.comparisons(), strict=True):
            lines += [f"At {reports[0].rate_per_s:.3g} conversations/s:", "", *_table(reports), ""]
            if comparisons:
                lines += [*_ratios(reports[0], comparisons), ""]
    lines += [f"- {one.system} was not measured: {one.why}" for one in missing]
    return "\n".join(lines)


def _how(measured: Measured) -> Iterator[str]:
    first = measured.reports[0][0]
    names = ", ".join(report.system for report in measured.reports[0])
    alternation = told(first.environment.get("alternation"))
    if alternation is None:
        yield f"{names} alone ({measured.why})."
        return
    starts = first.environment["alternation"]["unit"] == "starts"
    together = "One of them was up at a time" if starts else "All of them were up at the same time"
    yield f"**{names}.** {alternation} {together} ({measured.why})."
    if measured.idle_cores:
        idle = ", ".join(f"{name} {busy:.2f}" for name, busy in measured.idle_cores.items())
        yield f"Cores kept busy by each while nobody asked it anything: {idle}."


def _table(reports: list[Report]) -> Iterator[str]:
    heads = ["system", *(f"{head}: p50 / p95" for head, _ in _COLUMNS)]
    heads += ["over SLO: TTFET / last TBT / end to end", "failed turns"]
    heads += ["tokens handed off a conversation"]
    yield _line(heads)
    yield "|" + "---|" * len(heads)
    for report in reports:
        yield _line(_row(report.system, report.result))


def _row(system: str, result: Result) -> Iterator[str]:
    yield system
    for head, metric in _COLUMNS:
        found = result.latencies.get(metric)
        factor = 1000 if head.endswith("ms") else 1
        yield f"{factor * found.p50:.3g} / {factor * found.p95:.3g}" if found else "none"
    over = [result.violations.get(metric) for metric in _OVER_SLO]
    yield " / ".join("not available" if share is None else f"{share:.0%}" for share in over)
    yield f"{sum(result.failures.values())}"
    moved = result.server.handoff_tokens_per_conversation
    yield "not available" if moved is None else f"{moved:,.0f}"


def _ratios(base: Report, comparisons: list[Comparison]) -> Iterator[str]:
    unit = base.environment["alternation"]["unit"]
    yield f"Times {base.system}'s within the same {unit}: median, and 95 % interval."
    yield ""
    yield _line(["system", *(head for head, _, _ in _RATIOS)])
    yield "|" + "---|" * (len(_RATIOS) + 1)
    for comparison in comparisons:
        by_name = {(one.metric, one.statistic): one for one in comparison.ratios}
        cells = []
        for _, metric, statistic in _RATIOS:
            one = by_name.get((metric, statistic))
            cells.append(f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})" if one else "none")
        yield _line([comparison.label, *cells])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
