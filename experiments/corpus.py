"""A whole corpus of recorded sessions, simulated: ConServe and what one would run instead.

All turns of all sessions in ``--data``, with their pauses as recorded, in a closed loop: where one
session ends the next begins, in an order that all systems share. Tokens are a quarter, so that the
longest history fits an engine. The loop lasts until about as many sessions have begun as there are,
at least an hour; its first third is not counted, and sessions begin evenly over half of that.

With ``--find`` it seeks, by bisection, how many agents one engine serves within each objective: the
p95 of TTFT below 2 s, and 30 tokens/s in 19 of 20 answers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD

from autoscale.capacity.profile import load_profile
from benchmarks.latencies import by_conversation, latencies_of
from benchmarks.records import TurnRecord
from benchmarks.simulate.run import EngineCounts, make_cluster, make_system
from benchmarks.workloads import Arrivals, Changes, Workload, recorded
from benchmarks.workloads.traces import recordings
from experiments.harness import Experiment, at_least_1, figure, group, numbers

VOCABULARY = range(1_000, 4_000)
CHANGES = Changes(scale_tokens=0.25)
_LEAST_S, _SESSION_S = 3600.0, 10_000.0
# AA-AgentPerf's speed, and what a user waits for without wondering.
_TTFT_S, _TOKEN_S = 2.0, 1 / 30
_MOST_AGENTS = 1024
# As long as clients of ThunderAgent wait; engines are not told of conversations' ends.
_ALIKE: dict[str, Any] = {"keeps_ended": True, "queue_timeout_s": 1800.0}
# Systems, whether they have host memory, as `benchmarks.simulate.run` knows them, and their colour.
SYSTEMS: dict[str, tuple[str, bool, str]] = {
    "least loaded": ("vllm", False, "silver"),
    "affinity": ("affinity", False, "gray"),
    "ttl": ("ttl", False, "tab:olive"),
    "thunderagent": ("thunderagent", False, "tab:orange"),
    "least loaded + host": ("vllm", True, "tab:brown"),
    "affinity + host": ("affinity", True, "tab:green"),
    "sticky + host": ("sticky", True, "tab:cyan"),
    "thunderagent + host": ("thunderagent", True, "tab:red"),
    "conserve": ("elastic_parking", True, "tab:blue"),
    "coll": ("collocated_parking", True, "tab:blue"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What came of the turns that ended in the time that counts.

    Attributes:
        turns, first_turns, refused: how many ended, how many of these were first ones, and how many
            were refused.
        output_tokens_per_s: over all of the time that counts.
        found: of what later turns repeat, the share that no engine had to compute.
        ttft_s, first_s: p50 and p95 of the time to the first token, of all turns and of first ones.
        ttfet_s, served_s: p50 and p95, less pauses, of conversations that began and ended in this
            time: until the first token for the user, and all of it.
        token_s: p95 of answers' mean time between tokens.
    """

    turns: int
    first_turns: int
    refused: int
    output_tokens_per_s: float
    found: float
    ttft_s: tuple[float, float]
    first_s: tuple[float, float]
    ttfet_s: tuple[float, float]
    served_s: tuple[float, float]
    token_s: float


def found_in(records: Sequence[TurnRecord], from_s: float, until_s: float) -> Found:
    here = [one for one in records if from_s < one.ended_s <= until_s]
    ended = [one for one in here if one.outcome == "completed" and one.first_token_s is not None]
    later = [one for one in ended if one.turn > 1]
    repeated = sum(one.reused_tokens or 0 for one in later)
    cached = sum(min(one.reused_tokens or 0, one.cached_tokens or 0) for one in later)
    whole: dict[str, list[float]] = {}
    for turns in by_conversation(records).values():
        if turns[0].turn == 1 and turns[0].sent_s > from_s and turns[-1].ended_s <= until_s:
            for metric, value in latencies_of(turns):
                whole.setdefault(metric, []).append(value)
    return Found(
        turns=len(ended),
        first_turns=len(ended) - len(later),
        refused=sum(one.outcome in ("failed", "timeout") for one in here),
        output_tokens_per_s=sum(one.output_tokens for one in ended) / (until_s - from_s),
        found=cached / repeated if repeated else 0.0,
        ttft_s=_p50_p95(_ttft_s(one) for one in ended),
        first_s=_p50_p95(_ttft_s(one) for one in ended if one.turn == 1),
        ttfet_s=_p50_p95(whole.get("ttfet_less_gaps", ())),
        served_s=_p50_p95(whole.get("e2e_less_gaps", ())),
        token_s=_p50_p95(_token_s(one) for one in ended if one.output_tokens > 1)[1],
    )


def _ttft_s(turn: TurnRecord) -> float:
    assert turn.first_token_s is not None
    return turn.first_token_s - turn.sent_s


def _token_s(turn: TurnRecord) -> float:
    assert turn.first_token_s is not None
    last_s = turn.token_times_s[-1] if turn.last_token_s is None else turn.last_token_s
    return (last_s - turn.first_token_s) / (turn.output_tokens - 1)


def _p50_p95(values: Iterable[float]) -> tuple[float, float]:
    """Return both; not numbers where there is no value."""
    p50, p95 = np.percentile(list(values) or [float("nan")], (50, 95))
    return float(p50), float(p95)


# --- Simulating -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation.

    Attributes:
        agents: sessions under way at a time, on all engines together.
        host_tokens: of KV in host memory, for each engine; 0: none.
        cap_w: power cap of each engine; None: the profile's highest.
    """

    data: Path
    profile: str
    system: str
    engines: int
    agents: int
    host_tokens: int
    seed: int
    cap_w: float | None = None


def simulate(run: Run) -> tuple[Found, float | None]:
    """Return what came of it, and the mean power of all engines in watts, where it is known."""
    kind, has_host, _ = SYSTEMS[run.system]
    prefillers = int(kind.startswith("elastic") and run.engines > 1)
    counts = EngineCounts(prefillers, run.engines - prefillers, run.cap_w, run.cap_w)
    host_tokens = run.host_tokens * run.engines * has_host
    system = make_system(
        kind, load_profile(run.profile), counts, **_ALIKE, host_tokens=host_tokens
    )  # fmt: skip
    records: list[TurnRecord] = []
    cluster = make_cluster(system, records.extend)
    workload = _workload(run.data, run.seed)
    sessions = workload.counts["sessions"] // 5
    until_s = max(_LEAST_S, sessions * _SESSION_S / run.agents)
    cluster.run_programs(workload, run.agents, until_s, ramp_s=until_s / 6)
    energy_j = cluster.energy_j()
    power_w = None if energy_j is None else energy_j / cluster.ended_s
    return found_in(records, until_s / 3, until_s), power_w


@lru_cache(maxsize=1)
def _workload(data: Path, seed: int) -> Workload:
    """All sessions, several times: with the longest pauses a loop begins more than there are."""
    return recorded(
        data,
        sessions=5 * len(recordings(data)),
        arrivals=Arrivals("together"),
        vocabulary=VOCABULARY,
        changes=CHANGES,
        seed=seed,
    )


def _systems(host_tokens: int) -> list[str]:
    """Those with host memory; those without it where there is none."""
    return [name for name, (_, has_host, _) in SYSTEMS.items() if has_host == bool(host_tokens)]


# --- How many agents ------------------------------------------------------------------------------

_OBJECTIVES = ("TTFT p95 < 2 s", "30 tokens/s in 19 of 20")


def most_agents(run: Run) -> list[tuple[int, float | None]]:
    """For each objective, the most agents that keep it, and the watts then; 0 where one does not.

    It is taken that more agents are never served better.
    """
    known: dict[int, tuple[Found, float | None]] = {}

    def look(agents: int) -> tuple[Found, float | None]:
        if agents not in known:
            at = Run(**{**{one: getattr(run, one) for one in run.__slots__}, "agents": agents})
            known[agents] = simulate(at)
        return known[agents]

    best = []
    for keeps in (
        lambda found: found.ttft_s[1] < _TTFT_S and not found.refused,
        lambda found: found.token_s < _TOKEN_S and not found.refused,
    ):
        low, high = 0, _MOST_AGENTS
        while high - low > max(1, low // 20):
            middle = round((max(low, 4) * high) ** 0.5)
            middle = min(high - 1, max(low + 1, middle))
            low, high = (middle, high) if keeps(look(middle)[0]) else (low, middle)
        best.append((low, look(low)[1] if low else None))
    return best
