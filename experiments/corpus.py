"""A whole corpus of recorded sessions, simulated: ConServe and what one would run instead.

All turns of all sessions in ``--data``, with their pauses as recorded, in a closed loop: where one
session ends the next begins, in an order that all systems share. Tokens are a quarter, so that the
longest history fits an engine. The loop lasts until about as many sessions have begun as there are,
at least 40 minutes; its first third is not counted. The first sessions begin evenly over half of
it, or over 50 minutes.

With ``--find`` it seeks, by bisection, how many agents engines serve within each objective, and how
many a kilowatt: the p95 of TTFT below 2 s, and 30 tokens/s in 19 of 20 answers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD

from autoscale.capacity.profile import Profile, load_profile
from conserve_lab.latencies import by_conversation, latencies_of
from conserve_lab.records import TurnRecord
from conserve_lab.simulate.run import EngineCounts, make_cluster, make_system
from conserve_lab.workloads import Arrivals, Changes, Workload, recorded
from conserve_lab.workloads.files import recordings
from experiments.harness import Experiment, at_least_1, figure, group, numbers

VOCABULARY = range(1_000, 4_000)
CHANGES = Changes(scale_tokens=0.25)
# Seconds: of a loop, at least; of a session; and until the first sessions have begun, at most.
_LEAST_S, _SESSION_S, _RAMP_S = 2400.0, 10_000.0, 3000.0
# AA-AgentPerf's speed, and what a user waits for without wondering.
_TTFT_S, _TOKEN_S = 2.0, 1 / 30
# On an engine.
_MOST_AGENTS = 512
# As long as clients of ThunderAgent wait; engines are not told of conversations' ends.
_ALIKE: dict[str, Any] = {"keeps_ended": True, "queue_timeout_s": 1800.0}
# Systems, whether they have host memory, as `conserve_lab.simulate.run` has them, and their colour.
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
}


@dataclass(frozen=True, slots=True)
class Found:
    """Describes the turns that ended in the time that counts.

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

    data: str
    profile: str
    system: str
    engines: int
    agents: int
    host_tokens: int
    seed: int
    cap_w: float | None = None


def simulate(run: Run) -> tuple[Found, float | None]:
    """Return what came of it, and the mean power of all engines in watts, where it is known."""
    workload = _workload(run.data, run.seed)
    sessions = workload.counts["sessions"] // 5
    until_s = max(_LEAST_S, sessions * _SESSION_S / run.agents)
    records, power_w = replay(run, load_profile(run.profile), workload, until_s, _RAMP_S)
    return found_in(records, until_s / 3, until_s), power_w


def replay(
    run: Run, profile: Profile, workload: Workload, until_s: float, ramp_s: float
) -> tuple[list[TurnRecord], float | None]:
    """Keep a run's agents under way on engines of a profile; returns turns, and watts if known."""
    kind, has_host, _ = SYSTEMS[run.system]
    prefillers = int(kind.startswith("elastic") and run.engines > 1)
    counts = EngineCounts(prefillers, run.engines - prefillers, run.cap_w, run.cap_w)
    host_tokens = run.host_tokens * run.engines * has_host
    records: list[TurnRecord] = []
    system = make_system(kind, profile, counts, **_ALIKE, host_tokens=host_tokens)
    cluster = make_cluster(system, records.extend)
    cluster.run_programs(workload, run.agents, until_s, ramp_s=min(until_s / 2, ramp_s))
    energy_j = cluster.energy_j()
    return records, None if energy_j is None else energy_j / cluster.ended_s


@lru_cache(maxsize=1)
def _workload(data: str, seed: int) -> Workload:
    """All sessions, several times: with the longest pauses a loop begins more than there are."""
    return recorded(
        Path(data),
        sessions=5 * len(recordings(Path(data))),
        arrivals=Arrivals("together"),
        vocabulary=VOCABULARY,
        changes=CHANGES,
        seed=seed,
    )


# --- How many agents ------------------------------------------------------------------------------

_OBJECTIVES: dict[str, Callable[[Found], bool]] = {
    "TTFT p95 < 2 s": lambda found: found.ttft_s[1] < _TTFT_S,
    "30 tokens/s in 19 of 20": lambda found: found.token_s < _TOKEN_S,
}


def most_agents(run: Run) -> list[tuple[int, float | None]]:
    """Return, for each objective, the most agents that keep it, and the power then in watts.

    It is taken that more agents are never served better, and none may be refused a turn.
    """
    known: dict[int, tuple[Found, float | None]] = {}
    best: list[tuple[int, float | None]] = []
    for keeps in _OBJECTIVES.values():
        low, high = 0, _MOST_AGENTS * run.engines
        while high - low > max(1, low // 20):
            # By the geometric mean: the number may be of any size.
            agents = min(high - 1, max(low + 1, round(math.sqrt(max(low, 4) * high))))
            if agents not in known:
                known[agents] = simulate(replace(run, agents=agents))
            found = known[agents][0]
            low, high = (low, agents) if found.refused or not keeps(found) else (agents, high)
        best.append((low, known[low][1] if low else None))
    return best


def find(experiment: Experiment) -> None:
    """Show how many agents each system serves; of rounds, the least and most."""
    options = experiment.options
    runs = [
        Run(
            str(options.data),
            profile,
            system,
            engines,
            0,
            host_tokens,
            options.seed + number,
            cap_w,
        )
        for profile in options.profiles.split(",")
        for engines in map(int, options.engines)
        for host_tokens in map(int, options.host_tokens)
        for cap_w in dict.fromkeys((None, options.cap if load_profile(profile).power else None))
        for system in options.systems.split(",")
        for number in range(options.rounds)
    ]
    found = list(zip(runs, experiment.on_all_cores(most_agents, runs), strict=True))
    rows = []
    for ones in group(found, lambda one: replace(one[0], seed=0)).values():
        run = ones[0][0]
        cap = "" if run.cap_w is None else f", {run.cap_w:g} W"
        row = [f"{run.engines} {run.profile}{cap}, {run.host_tokens:,}", run.system]
        for number in range(len(_OBJECTIVES)):
            agents = [best[number][0] for _, best in ones]
            power_w = [w for _, best in ones if (w := best[number][1])]
            row.append(f"{fmean(agents):.0f} ({min(agents)} to {max(agents)})")
            row.append(f"{1000 * fmean(agents) / fmean(power_w):.0f}" if power_w else "")
        rows.append(row)
    columns = ["engines, host tokens each", "system"]
    for name in _OBJECTIVES:
        columns += [name, "a kW"]
    experiment.show("the most agents at a time", columns, rows, names=2, box=SIMPLE_HEAD)
    experiment.save(found)


# --- The corpus -----------------------------------------------------------------------------------


def cells(found: Found) -> list[str]:
    """Return a table's cells, for `COLUMNS`."""
    both = (found.ttft_s, found.first_s, found.ttfet_s, found.served_s)
    return [
        *(f"{p50:.2f} / {p95:.2f}" if p50 == p50 else "" for p50, p95 in both),
        f"{1000 * found.token_s:.1f}",
        f"{found.output_tokens_per_s:,.1f}",
        f"{found.found:.1%}",
        f"{found.refused}",
    ]


COLUMNS = ["TTFT, s: p50 / p95", "of first turns", "TTFET less pauses", "time served"]
COLUMNS += ["ms a token, p95", "tokens/s", "found", "refused"]


def draw(found: Sequence[tuple[Run, Found]], path: Path) -> None:
    """Draw the p95 of TTFT, and whole conversations' mean time, over the number of engines."""
    profiles = list(group(found, lambda one: one[0].profile))
    picture = figure(4.8 * len(profiles), 4)
    for axes, profile in zip(
        picture.subplots(1, len(profiles), squeeze=False)[0], profiles, strict=True
    ):
        for system, (_, has_host, colour) in SYSTEMS.items():
            line = [one for one in found if (one[0].profile, one[0].system) == (profile, system)]
            axes.plot(
                [run.engines for run, _ in line],
                [one.ttft_s[1] for _, one in line],
                color=colour,
                marker="o",
                linestyle="-" if has_host else ":",
                label=system,
            )
        axes.set(title=profile, xscale="log", yscale="log", xlabel="engines")
        axes.set_xticks([run.engines for run, _ in line], [f"{run.engines}" for run, _ in line])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    picture.axes[0].set_ylabel("TTFT p95, s")
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    picture.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("corpus", __doc__, width=150, seed=0, rounds=1, data=True)
    experiment.option("--profiles", "h100-qwen3-8b,a40-qwen3-0.6b")
    experiment.option("--systems", ",".join(SYSTEMS))
    experiment.option("--engines", "1,4,16,64", "how many", type=numbers, metavar="N,...")
    experiment.option("--agents", 48, "at a time, for each engine", type=at_least_1)
    about = "of KV in host memory, for each engine, of systems that have some"
    experiment.option("--host-tokens", "437500", about, type=numbers, metavar="N,...")
    experiment.option(
        "--cap",
        None,
        "also under this power cap, in watts, where power is known (--find)",
        type=float,
    )
    experiment.parser.add_argument("--find", action="store_true", help="seek the most agents")
    options = experiment.parse(arguments)
    if options.data is None:
        experiment.parser.error("--data: give a folder of recorded sessions")
    if unknown := set(options.systems.split(",")) - set(SYSTEMS):
        known = ", ".join(SYSTEMS)
        experiment.parser.error(f"--systems: no {', '.join(sorted(unknown))}; there are {known}")
    if options.find:
        find(experiment)
        return
    runs = [
        Run(str(options.data), profile, system, engines, options.agents * engines, host_tokens,
            options.seed)
        for profile in options.profiles.split(",")
        for engines in map(int, options.engines)
        for host_tokens in map(int, options.host_tokens)
        for system in options.systems.split(",")
    ]  # fmt: skip
    found = [
        (run, one)
        for run, (one, _) in zip(runs, experiment.on_all_cores(simulate, runs), strict=True)
    ]
    for (profile, host_tokens), ones in group(
        found, lambda one: (one[0].profile, one[0].host_tokens)
    ).items():
        rows: list[list[str]] = []
        for engines, several in group(ones, lambda one: one[0].engines).items():
            rows += [[f"{engines}", run.system, *cells(one)] for run, one in several]
            rows.append([])
        title = f"{profile}, {options.agents} agents an engine; host: {host_tokens:,} tokens each"
        experiment.show(title, ["engines", "system", *COLUMNS], rows, names=2, box=SIMPLE_HEAD)
    experiment.save(found)
    if path := experiment.file("png"):
        draw(found, path)


if __name__ == "__main__":
    main()
