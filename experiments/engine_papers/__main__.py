"""MARS's and AgentServe's evaluations, simulated inside one engine, beside what they publish.

Everything is simulated, step by step: vLLM's scheduler, the rules of MARS's baselines, and
ConServe's, on what steps take by data sheets (`benchmarks/simulate/inside/costs.py`). A ratio above
1 is in ConServe's favour.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, geometric_mean
from typing import Any

from rich.box import SIMPLE_HEAD

from experiments.claims import Claim, show_claims
from experiments.engine_papers import agentserve, mars
from experiments.harness import Experiment, at_least_1, group, pivot

# Mechanisms are left out at these: without admission a run takes a hundred times as long.
_WITHOUT_AT = (
    mars.Point("H100", "ILR-1", 0.5, 40),
    mars.Point("H100", "ILR-3", 0.33, 40),
    mars.Point("H200", "ILR-4", 0.5, 40),
)
_BASELINES = [one.name for one in mars.BASELINES]
_LLAMA, _VLLM, _SGLANG, _LANE = (
    one.name for one in (agentserve.LLAMA_CPP, agentserve.VLLM, agentserve.SGLANG, agentserve.LANE)
)
Value = Callable[[Any], float]


def ratios(
    found: Iterable[Any], value: Value, over: Sequence[str], system: str
) -> dict[Any, float]:
    """Return the best of some systems' values over another one's, at each point.

    It is a geometric mean over seeds.
    """
    by: dict[Any, dict[int, dict[str, float]]] = {}
    for one in found:
        by.setdefault(one.point, {}).setdefault(one.seed, {})[one.system] = value(one)
    return {
        point: geometric_mean(
            min(values[name] for name in over) / values[system] for values in seeds.values()
        )
        for point, seeds in by.items()
        if all(name in values for values in seeds.values() for name in (*over, system))
    }


def mean_s(one: mars.Outcome) -> float:
    return one.mean_s


def per_good_s(one: mars.Outcome) -> float:
    """Return the time for each program that ended within the largest of `mars.SLACKS`."""
    return 1 / one.goodput_per_s[-1] if one.goodput_per_s[-1] else math.inf


# --- What the papers claim ------------------------------------------------------------------------


def claims_of_mars(
    found: Sequence[mars.Outcome], without: Sequence[mars.Outcome]
) -> Iterable[Claim]:
    """Yield claims of programs' mean time: over ConServe's, and without one of its mechanisms."""

    def gains(
        ones: Sequence[mars.Outcome], over: Sequence[str], system: str, value: Value = mean_s
    ) -> list[float]:
        return [*ratios(ones, value, over, system).values()]

    for gpu, said, reached in (("H100", "1.44 to 5.80", 1.44), ("H200", "1.90 to 5.94", 1.90)):
        on_it = [one for one in found if one.point.gpu == gpu]
        for name in (mars.OURS.name, mars.PACKED.name):
            what = f"{gpu}: mean time, strongest baseline over {name}"
            yield Claim("MARS, 6.3", what, said, reached, gains(on_it, _BASELINES, name))
        over_vllm = gains(on_it, ["vllm"], mars.OURS.name)
        yield Claim("", f"{gpu}: mean time, vllm over conserve", "(a figure)", 1.0, over_vllm)
    what = f"goodput at {mars.SLACKS[-1]:g} times, conserve over the best baseline"
    on_h100 = [one for one in found if one.point.gpu == "H100"]
    for regime, ones in group(on_h100, lambda one: one.point.regime).items():
        said, reached = ("2 to 3", 2.0) if regime == "ILR-1" else ("others near zero", 2.0)
        shares = gains(ones, _BASELINES, mars.OURS.name, per_good_s)
        yield Claim("MARS, 6.3", f"H100, {regime}: {what}", said, reached, shares)
    for name, said, reached in (
        ("without order", "its coordinator: 2 to 5", 2.0),
        ("without admission", "its control plane: 1.5 to 3", 1.5),
        ("without retention", "its co-scheduler: 1.5 to 2", 1.5),
        ("without parts of prompts", "the same", 1.5),
        ("without chunks", "-", 1.0),
        ("without admission, order", "-", 1.0),
        ("admission alone", "-", 1.0),
    ):
        losses = gains(without, [name], mars.OURS.name)
        yield Claim("MARS, 6.5", f"{name}, over conserve", said, reached, losses)


_TTFT_P50, _TTFT_P95 = "TTFT p50", "TTFT p95"
_TPOT_P50, _TPOT_P95 = "TPOT p50", "TPOT p95"
_LATER, _FIRST = "later turns' TTFT p95", "first turns' TTFT p95"
_THROUGHPUT = "throughput"
_VALUES: dict[str, Value] = {
    _TTFT_P50: lambda one: one.ttft_p50_s,
    _TTFT_P95: lambda one: one.ttft_p95_s,
    _TPOT_P50: lambda one: one.tpot_p50_s,
    _TPOT_P95: lambda one: one.tpot_p95_s,
    _LATER: lambda one: one.resume_p95_s,
    _FIRST: lambda one: one.cold_p95_s,
    _THROUGHPUT: lambda one: 1 / one.tokens_per_s,
}
_OF_AGENTSERVE = (
    ("IV-B", _TTFT_P50, _SGLANG, "1.1 to 1.3", 1.1),
    ("IV-B", _TTFT_P50, _VLLM, "1.5 to 1.8", 1.5),
    ("IV-B", _TTFT_P50, _LLAMA, "up to 2.8", 2.8),
    ("IV-B", _TTFT_P95, _SGLANG, "up to 1.3", 1.3),
    ("IV-B", _TTFT_P95, _VLLM, "1.5 to 1.8", 1.5),
    ("IV-B", _TTFT_P95, _LLAMA, "up to 2.8", 2.8),
    ("", _LATER, _VLLM, "-", 1.0),
    ("", _LATER, _LLAMA, "-", 1.0),
    ("", _FIRST, _VLLM, "-", 1.0),
    ("IV-B", _TPOT_P50, _SGLANG, "1.1 to 1.2", 1.1),
    ("IV-B", _TPOT_P50, _VLLM, "1.3 to 1.8", 1.3),
    ("IV-B", _TPOT_P50, _LLAMA, "more than 1.5", 1.5),
    ("IV-B", _TPOT_P95, _SGLANG, "up to 1.3", 1.3),
    ("IV-B", _TPOT_P95, _VLLM, "nearly 2.0", 2.0),
    ("IV-B", _TPOT_P95, _LLAMA, "up to 2.7", 2.7),
    ("IV-B", _THROUGHPUT, _SGLANG, "1.3 to 1.5", 1.3),
    ("IV-B", _THROUGHPUT, _VLLM, "1.2 to 1.5", 1.2),
    ("IV-B", _THROUGHPUT, _LLAMA, "up to 2.0 to 2.2", 2.0),
    # With a split that nothing moves, and without the lane.
    ("IV-D", _TTFT_P95, agentserve.STATIC.name, "No-Alg: TTFT 1.15 to 1.25", 1.15),
    ("IV-D", _TPOT_P95, agentserve.STATIC.name, "No-Alg: TPOT up to 1.4", 1.4),
    ("", _TTFT_P95, agentserve.CHUNKS.name, "-", 1.0),
    ("", _TPOT_P95, agentserve.CHUNKS.name, "-", 1.0),
)


def claims_of_agentserve(found: Sequence[agentserve.Outcome]) -> Iterable[Claim]:
    """Yield claims of others' latencies over the lane's, and of its throughput over theirs."""
    for section, what, over, published, reached in _OF_AGENTSERVE:
        gains = [*ratios(found, _VALUES[what], [over], _LANE).values()]
        compared = f"{_LANE} over {over}" if what == _THROUGHPUT else f"{over} over {_LANE}"
        source = f"AgentServe, {section}" if section else ""
        yield Claim(source, f"{what}, {compared}", published, reached, gains)


# --- Tables ---------------------------------------------------------------------------------------


def show_mars(found: Sequence[mars.Outcome], experiment: Experiment) -> None:
    """Print programs' mean times, and what MARS's strongest baseline takes of ConServe's."""
    for gpu, on_it in group(found, lambda one: one.point.gpu).items():
        columns, rows = pivot(
            on_it,
            lambda one: (f"{one.point.regime}, {one.point.rate_per_s:g}/s",),
            lambda one: one.system,
            lambda ones: f"{fmean(map(mean_s, ones)):,.0f} {fmean(one.found for one in ones):.0%}",
        )
        for system, heading in (
            (mars.OURS, "best of three / conserve"), (mars.PACKED, "with packing"),
        ):  # fmt: skip
            columns.append(heading)
            gains = ratios(on_it, mean_s, _BASELINES, system.name).values()
            for row, gain in zip(rows, gains, strict=True):
                row.append(f"{gain:.2f}")
        title = f"MARS's workloads, {gpu}: a program's mean time in s; what was found"
        experiment.show(title, ["", *columns], rows, wrap=True, box=SIMPLE_HEAD)


def show_goodput(found: Sequence[mars.Outcome], experiment: Experiment) -> None:
    """Print the programs a minute that ended within each slack (MARS, figure 9)."""
    for gpu, on_it in group(found, lambda one: one.point.gpu).items():
        columns, rows = pivot(
            on_it,
            lambda one: (f"{one.point.regime}, {one.point.rate_per_s:g}/s",),
            lambda one: one.system,
            lambda ones: " / ".join(
                f"{60 * fmean(values):.1f}"
                for values in zip(*(one.goodput_per_s for one in ones), strict=True)
            ),
        )
        slacks = " / ".join(f"{slack:g}" for slack in mars.SLACKS)
        title = f"MARS's workloads, {gpu}: programs/min within {slacks} times their time alone"
        experiment.show(title, ["", *columns], rows, wrap=True, box=SIMPLE_HEAD)


def show_without(found: Sequence[mars.Outcome], experiment: Experiment) -> None:
    """Print mean times without a mechanism, over those with all of them."""
    points = group(found, lambda one: one.point)
    rows = []
    for system in mars.WITHOUT:
        losses = ratios(found, mean_s, [system.name], mars.OURS.name)
        rows.append([system.name, *(f"{losses[point]:.2f}" for point in points)])
    columns = ["", *(f"{one.gpu}, {one.regime}, {one.rate_per_s:g}/s" for one in points)]
    title = "ConServe without one mechanism: a program's mean time over that with all"
    experiment.show(title, columns, rows, wrap=True, box=SIMPLE_HEAD)


def show_agentserve(found: Sequence[agentserve.Outcome], experiment: Experiment) -> None:
    most = max(one.point.agents for one in found)
    with_most = [one for one in found if one.point.agents == most]

    def cell(ones: Sequence[agentserve.Outcome]) -> str:
        p50_ms, p95_ms, tpot_ms = (
            1e3 * fmean(map(_VALUES[name], ones)) for name in (_TTFT_P50, _TTFT_P95, _TPOT_P95)
        )
        return f"{p50_ms:,.0f} / {p95_ms:,.0f}, {tpot_ms:.1f}"

    def row(one: agentserve.Outcome) -> tuple[str]:
        paradigm = "ReAct" if one.point.paradigm == "react" else "P&E"
        return (f"{one.point.gpu}, {one.point.model}, {paradigm}",)

    for tools, here in group(with_most, lambda one: one.point.tools).items():
        columns, rows = pivot(here, row, lambda one: one.system, cell)
        workloads = f"AgentServe's workloads, {most} agents, {tools} tools"
        title = f"{workloads}: TTFT p50 / p95 and TPOT p95, ms"
        experiment.show(title, ["", *columns], rows, wrap=True, box=SIMPLE_HEAD)


def show_attainment(found: Sequence[agentserve.Outcome], experiment: Experiment) -> None:
    """Print the share of sessions that met both SLOs (AgentServe, figure 6)."""

    def row(one: agentserve.Outcome) -> tuple[str]:
        return (f"{one.point.gpu}, {one.point.model}, {one.point.agents} agents",)

    for tools, here in group(found, lambda one: one.point.tools).items():
        columns, rows = pivot(
            here,
            row,
            lambda one: one.system,
            lambda ones: f"{fmean(one.attained for one in ones):.0%}",
        )
        title = f"AgentServe's workloads, {tools} tools: sessions that met both SLOs"
        experiment.show(title, ["", *columns], rows, wrap=True, box=SIMPLE_HEAD)


def _run(case: tuple[Callable[..., Any], Any, Any, int]) -> Any:
    run, *arguments = case
    return run(*arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("engine_papers", __doc__, width=150)
    experiment.option("--seeds", 2, "how many", type=at_least_1, metavar="N")
    options = experiment.parse(arguments)

    def measure(run: Callable[..., Any], points: Sequence[Any], systems: Sequence[Any]) -> Any:
        return experiment.on_all_cores(
            _run,
            [
                (run, system, point, seed)
                for point in points
                for seed in range(options.seeds)
                for system in systems
            ],
        )

    served = measure(mars.run, mars.POINTS, mars.SYSTEMS)
    without = measure(mars.run, _WITHOUT_AT, (mars.OURS, *mars.WITHOUT))
    agents = measure(agentserve.run, agentserve.POINTS, agentserve.SYSTEMS)
    show_mars(served, experiment)
    show_goodput(served, experiment)
    show_without(without, experiment)
    show_agentserve(agents, experiment)
    show_attainment(agents, experiment)
    title = "claims, and what came out (ratios above 1: ConServe is better)"
    show_claims(f"MARS: {title}", claims_of_mars(served, without), experiment)
    for tools in agentserve.TOOLS:
        with_them = [one for one in agents if one.point.tools == tools]
        listed = claims_of_agentserve(with_them)
        show_claims(f"AgentServe, {tools} tools: {title}", listed, experiment)
    experiment.save({"mars": served, "mars, without": without, "agentserve": agents})


if __name__ == "__main__":
    main()
