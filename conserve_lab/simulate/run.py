"""From a profile, a number of engines and a workload to the report that `conserve bench` makes."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, get_args

from autoscale.capacity.profile import Profile
from conserve.placement import POLICIES, PolicyName
from conserve_lab.machine import environment
from conserve_lab.metrics import Tally, evaluate
from conserve_lab.objectives import Objectives, Reference, reference
from conserve_lab.records import Script, TurnRecord
from conserve_lab.report import Report
from conserve_lab.selection import Selection
from conserve_lab.simulate.clients import Clients
from conserve_lab.simulate.cluster import Cluster
from conserve_lab.simulate.costs import Costs, Role
from conserve_lab.simulate.fleet import Fleet
from conserve_lab.simulate.rivals import RivalName
from conserve_lab.simulate.system import SimulationError, System
from conserve_lab.workloads import Workload

# Placements of the systems that are built as ConServe is. ``conserve`` is the paper's, ``pausing``
# the same with idle conversations giving up their room, ``parking`` with host memory for them, too.
# ``elastic`` and the next two are these with that placement; `conserve_lab.peers` has the others.
_PLACEMENTS: dict[str, PolicyName] = {
    "conserve": "conversation",
    "pausing": "conversation",
    "parking": "conversation",
    "elastic": "elastic",
    "elastic_pausing": "elastic",
    "elastic_parking": "elastic",
    "collocated": "collocated",
    "collocated_parking": "collocated",
    "full_disaggregation": "full_disaggregation",
    "per_turn": "per_turn",
}
PARKING = ("parking", "elastic_parking", "collocated_parking")
PAUSING = ("pausing", "elastic_pausing", *PARKING)
_RIVALS: tuple[RivalName, ...] = get_args(RivalName)
NAMES = (*_PLACEMENTS, *_RIVALS)

# More conversations are quick, but they tell no more.
UNLOADED = 100

OnConversation = Callable[[list[TurnRecord]], None]


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Engines, and their power caps (W; None: the profile's highest).

    A collocated system has as many engines as the others have in all, under the same caps.
    """

    prefillers: int = 1
    decoders: int = 3
    prefiller_cap_w: float | None = None
    decoder_cap_w: float | None = None

    def __post_init__(self) -> None:
        if self.prefillers < 0 or self.decoders < 1:
            raise SimulationError(
                f"{self.prefillers} prefillers and {self.decoders} decoders are asked for; "
                "give at least one decoder"
            )


def make_system(name: str, profile: Profile, engines: EngineCounts, **options: Any) -> System:
    """Make a system on engines of one profile; options are fields of `System`."""
    if name not in NAMES:
        raise SimulationError(f"the system is {name!r}; choose one of {', '.join(NAMES)}")
    rival: RivalName | None = name if name in _RIVALS else None
    placement = _PLACEMENTS.get(name, "collocated")
    # Rivals' engines have vLLM's own budget for a step, as decoders have; that of the paper's
    # collocated engines is smaller, for the sake of TBT.
    role: Role = "collocated" if rival is None else "decoder"
    if placement == "collocated":
        prefillers: tuple[Costs, ...] = ()
        decoders = engines.prefillers * (
            Costs.of(profile, role, engines.prefiller_cap_w),
        ) + engines.decoders * (Costs.of(profile, role, engines.decoder_cap_w),)
    elif not (engines.prefillers or POLICIES[placement].keeps_later_turns):
        raise SimulationError(f"{name} sends later turns to prefillers; give at least one")
    else:
        prefillers = engines.prefillers * (Costs.of(profile, "prefiller", engines.prefiller_cap_w),)
        decoders = engines.decoders * (Costs.of(profile, "decoder", engines.decoder_cap_w),)
    overhead = profile.overhead
    defaults: dict[str, Any] = {
        "direct_s": overhead.direct_s,
        "handed_off_s": overhead.handed_off_s,
        "pausing": name in PAUSING,
        "rival": rival,
        "keeps_ended": rival is not None,
    }
    if name in PARKING:
        # A collocated system has no more of it than the others.
        counted = decoders[-engines.decoders :]
        defaults["host_tokens"] = 2 * sum(one.capacity_tokens for one in counted)
    return System(name, placement, prefillers, decoders, **defaults | options)


def serve(
    system: System,
    plan: Iterable[tuple[float, Script]],
    on_conversation: OnConversation,
    *,
    gaps: bool = True,
) -> Clients:
    """Run a plan's conversations to their ends; returns the cluster as it is then."""
    cluster = make_cluster(system, on_conversation, gaps=gaps)
    cluster.run(plan)
    return cluster


def make_cluster(system: System, on_conversation: OnConversation, *, gaps: bool = True) -> Clients:
    kind = Cluster if system.rival is None else Fleet
    return kind(system, on_conversation, gaps=gaps)


def unloaded_records(system: System, workload: Workload, conversations: int) -> list[TurnRecord]:
    records: list[TurnRecord] = []
    for _, script in islice(workload, conversations):
        serve(system, [(0.0, script)], records.extend, gaps=False)
    return records


@dataclass(frozen=True, slots=True)
class Baseline:
    unloaded: Reference
    objectives: Objectives
    violations: dict[str, float]

    @classmethod
    def of(
        cls,
        system: System,
        workload: Workload,
        conversations: int = UNLOADED,
        slo_multiple: float = 5.0,
    ) -> "Baseline":
        """Run a few conversations unloaded; SimulationError: none can be served even alone."""
        records = unloaded_records(system, workload, conversations)
        try:
            unloaded = reference(records)
        except ValueError:
            said = next((record.error for record in records if record.error), "there is none")
            raise SimulationError(
                f"no conversation can be served by {system.name} even alone: {said}"
            ) from None
        objectives = Objectives.from_reference(unloaded, slo_multiple)
        return cls(unloaded, objectives, evaluate(records, objectives).violations)


def simulate(
    system: System,
    workload: Workload,
    profile: Profile,
    baseline: Baseline,
    *,
    described: dict[str, Any],
    arrivals: dict[str, Any],
    keep_samples: bool = True,
    on_conversation: OnConversation | None = None,
) -> Report:
    """Simulate one system under one workload.

    Args:
        described, arrivals: what `Selection` says of the workload, for the report.
        keep_samples: whether the report has every latency by conversation, or distributions alone.

    Raises SimulationError: the workload cannot be simulated, or has nothing in it.
    """
    tally = Tally(baseline.objectives, baseline.unloaded, keep_samples=keep_samples)

    def ended(turns: list[TurnRecord]) -> None:
        tally.add(turns)
        if on_conversation is not None:
            on_conversation(turns)

    cluster = serve(system, workload, ended)
    if not cluster.turns:
        raise SimulationError("the workload has no turns; give conversations")
    result = tally.result(cluster.energy_j(), cluster.figures(profile.handoff.bytes_per_token))
    busy = {
        engine.id: {
            "prefill_s": engine.busy_prefill_s,
            "decode_s": engine.busy_decode_s,
            "evicted_tokens": engine.evicted_tokens,
            "preemptions": engine.preemptions,
        }
        for engine in (*cluster.prefillers.values(), *cluster.decoders.values())
    }
    return Report(
        system=system.name,
        workload=described | {"counts": dict(workload.counts)},
        arrivals=arrivals,
        options={"simulated": asdict(system), "profile": profile.name},
        environment=environment(),
        result=result,
        samples=tally.samples or {},
        objectives=baseline.objectives,
        unloaded=baseline.unloaded,
        unloaded_violations=baseline.violations,
        driver={"simulated_s": cluster.ended_s, "engines": busy},
        warnings=list(_warnings(result.turns.get("failed", 0), cluster)),
    )


def _warnings(failed: int, cluster: Clients) -> Iterable[str]:
    if failed:
        yield (
            f"{failed} of {cluster.turns} turns failed. Latencies are of those that completed; "
            "over SLO, goodput and the pictures count the failed ones."
        )
    evicted = sum(engine.evicted_tokens for engine in cluster.decoders.values())
    preempted = sum(engine.preemptions for engine in cluster.decoders.values())
    if evicted or preempted:
        yield (
            f"Decoders ran out of KV: {evicted:,} tokens of idle conversations were dropped and "
            f"{preempted:,} running turns sent back, to be computed again. Give more decoders."
        )


def simulate_selection(
    names: Iterable[str],
    rates: Iterable[float],
    profile: Profile,
    engines: EngineCounts,
    selection: Selection,
    options: dict[str, dict[str, Any]],
    *,
    slo_multiple: float = 5.0,
    keep_samples: bool = True,
    on_conversation: Callable[[str], None] | None = None,
) -> list[Report]:
    """Simulate every system at every rate; bounds are those of the first system, unloaded.

    Args:
        options: fields of `System` that differ from its defaults, by the system's name.
        keep_samples: those of every system and rate are kept at the same time.
        on_conversation: called at each conversation's end with what runs.
    """
    systems = [make_system(name, profile, engines, **options.get(name, {})) for name in names]
    baseline = Baseline.of(systems[0], selection.workload(), slo_multiple=slo_multiple)
    reports = []
    for rate_per_s in rates:
        chosen = replace(selection, rate_per_s=rate_per_s)
        workload = chosen.workload()
        for system in systems:

            def ended(
                turns: list[TurnRecord], what: str = f"{system.name} at {rate_per_s:g}/s"
            ) -> None:
                if on_conversation is not None:
                    on_conversation(what)

            reports.append(
                simulate(
                    system,
                    workload,
                    profile,
                    baseline,
                    described=chosen.describe(),
                    arrivals=chosen.describe_arrivals(None),
                    keep_samples=keep_samples,
                    on_conversation=ended,
                )
            )
    return reports
