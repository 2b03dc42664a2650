"""Lists the two papers' claims, beside what came out here."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from experiments.engine_papers import agentserve, mars


@dataclass(frozen=True, slots=True)
class Claim:
    """One of them.

    Attributes:
        published: as the paper has it.
        reached: from here on it comes out: the highest of a paper's "up to", else the lowest value
            of its range.
        ratios: one for each workload, means over seeds.
    """

    source: str
    what: str
    published: str
    reached: float
    ratios: Sequence[float]

    @property
    def comes_out(self) -> str:
        """In how many workloads."""
        met = sum(ratio >= self.reached for ratio in self.ratios)
        return f"{met} of {len(self.ratios)}"

    @property
    def simulated(self) -> str:
        """The range of ratios."""
        return f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"


def ratios(
    found: Iterable[Any],
    value: Callable[[Any], float],
    over: Sequence[str],
    system: str,
) -> dict[Any, float]:
    """At each point: the best of some systems' values over another one's, a geometric mean over
    seeds."""
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


def _mean_s(one: mars.Outcome) -> float:
    return one.mean_s


def of_mars(found: Sequence[mars.Outcome]) -> list[Claim]:
    """Programs' mean time, of MARS's strongest baseline over ConServe's."""
    published = {"H100": ("1.44 to 5.80", 1.44), "H200": ("1.90 to 5.94", 1.90)}
    baselines = [one.name for one in mars.BASELINES]
    listed = []
    for gpu, (said, reached) in published.items():
        on_it = [one for one in found if one.point.gpu == gpu]
        for system in (mars.OURS, mars.PACKED):
            gains = ratios(on_it, _mean_s, baselines, system.name)
            if gains:
                what = f"{gpu}: mean time, strongest baseline over {system.name}"
                listed.append(Claim("MARS, 6.3", what, said, reached, list(gains.values())))
        gains = ratios(on_it, _mean_s, ["vllm"], mars.OURS.name)
        if gains:
            what = f"{gpu}: mean time, vllm over conserve"
            listed.append(Claim("", what, "(a figure)", 1.0, list(gains.values())))
    return listed


def of_mars_parts(found: Sequence[mars.Outcome]) -> list[Claim]:
    """Mean time without a mechanism, over that with all."""
    said = {
        "without order": ("its coordinator: 2 to 5", 2.0),
        "without admission": ("its control plane: 1.5 to 3", 1.5),
        "without retention": ("its co-scheduler: 1.5 to 2", 1.5),
        "without parts of prompts": ("the same", 1.5),
        "without chunks": ("-", 1.0),
        "without admission, order": ("-", 1.0),
        "admission alone": ("-", 1.0),
    }
    listed = []
    for name, (published, reached) in said.items():
        # Over ours: who is left without loses.
        losses = ratios(found, _mean_s, [name], mars.OURS.name)
        if losses:
            what = f"{name}, over conserve"
            listed.append(Claim("MARS, 6.5", what, published, reached, list(losses.values())))
    return listed


def of_agentserve(found: Sequence[agentserve.Outcome]) -> list[Claim]:
    """Latencies of AgentServe's baselines over ConServe's, and the inverse of throughputs."""
    llama, vllm, sglang = (
        one.name for one in (agentserve.LLAMA_CPP, agentserve.VLLM, agentserve.SGLANG)
    )
    lane = agentserve.LANE.name
    said: tuple[tuple[str, Callable[[agentserve.Outcome], float], str, str, float], ...] = (
        ("TTFT p50", lambda one: one.ttft_p50_s, sglang, "1.1 to 1.3", 1.1),
        ("TTFT p50", lambda one: one.ttft_p50_s, vllm, "1.5 to 1.8", 1.5),
        ("TTFT p50", lambda one: one.ttft_p50_s, llama, "up to 2.8", 2.8),
        ("TTFT p95", lambda one: one.ttft_p95_s, sglang, "up to 1.3", 1.3),
        ("TTFT p95", lambda one: one.ttft_p95_s, vllm, "1.5 to 1.8", 1.5),
        ("TTFT p95", lambda one: one.ttft_p95_s, llama, "up to 2.8", 2.8),
        ("later turns' TTFT p95", lambda one: one.resume_p95_s, vllm, "-", 1.0),
        ("later turns' TTFT p95", lambda one: one.resume_p95_s, llama, "-", 1.0),
        ("first turns' TTFT p95", lambda one: one.cold_p95_s, vllm, "-", 1.0),
        ("TPOT p50", lambda one: one.tpot_p50_s, sglang, "1.1 to 1.2", 1.1),
        ("TPOT p50", lambda one: one.tpot_p50_s, vllm, "1.3 to 1.8", 1.3),
        ("TPOT p50", lambda one: one.tpot_p50_s, llama, "more than 1.5", 1.5),
        ("TPOT p95", lambda one: one.tpot_p95_s, sglang, "up to 1.3", 1.3),
        ("TPOT p95", lambda one: one.tpot_p95_s, vllm, "nearly 2.0", 2.0),
        ("TPOT p95", lambda one: one.tpot_p95_s, llama, "up to 2.7", 2.7),
        ("throughput", lambda one: 1 / one.tokens_per_s, sglang, "1.3 to 1.5", 1.3),
        ("throughput", lambda one: 1 / one.tokens_per_s, vllm, "1.2 to 1.5", 1.2),
        ("throughput", lambda one: 1 / one.tokens_per_s, llama, "up to 2.0 to 2.2", 2.0),
    )
    return [
        Claim(
            "AgentServe, IV-B" if published != "-" else "",
            f"{what}, {over} over {lane}"
            if what != "throughput"
            else f"{what}, {lane} over {over}",
            published,
            reached,
            list(ratios(found, value, [over], lane).values()),
        )
        for what, value, over, published, reached in said
    ]


def of_agentserve_parts(found: Sequence[agentserve.Outcome]) -> list[Claim]:
    """Without the lane, and with a split that nothing moves."""
    lane = agentserve.LANE.name
    listed = []
    for system, published, reached in (
        (agentserve.STATIC, "No-Alg: TTFT 1.15 to 1.25, TPOT up to 1.4", 1.15),
        (agentserve.CHUNKS, "-", 1.0),
    ):
        measures: tuple[tuple[str, Callable[[agentserve.Outcome], float]], ...] = (
            ("TTFT p95", lambda one: one.ttft_p95_s),
            ("TPOT p95", lambda one: one.tpot_p95_s),
        )
        for what, value in measures:
            found_ratios = list(ratios(found, value, [system.name], lane).values())
            listed.append(
                Claim(
                    "AgentServe, IV-D" if published != "-" else "",
                    f"{what}, {system.name}, over {lane}",
                    published,
                    1.4 if what == "TPOT p95" and published != "-" else reached,
                    found_ratios,
                )
            )
    return listed
