"""Several models on one cluster's GPUs: who has how many engines, and who waits."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from autoscale.autoscaler import Scaling
from conserve.settings import Settings, load
from conserve_lab.simulate.sharing import Model, Outcome, ScalingCluster, simulate_sharing
from conserve_lab.simulate.system import SimulationError, System
from tests.unit.conserve_lab.simulate.scenes import COSTS, Scripted

COST = replace(COSTS, capacity_tokens=20_000)
SYSTEM = System("s", "elastic", (), (COST,), pausing=True, host_tokens=400_000)
GPUS = 3


def settings(drain_timeout_s: float = 300.0, num_gpus: int = 1) -> Settings:
    decoders = {"replicas": 1, "max_replicas": 3, "num_gpus": num_gpus}
    return load({"prefillers": 0, "decoders": decoders, "drain_timeout_s": drain_timeout_s})


SCALES = settings()


def conversations(
    name: str, count: int, from_s: float, gap_s: float, turns: int = 3
) -> list[tuple[float, Scripted]]:
    """Each has 3,000 tokens, so that an engine has room for six."""
    lengths = (3_000 + 100 * n for n in range(turns))
    script = [(tokens, tokens - 100, 50, gap_s if n else 0.0) for n, tokens in enumerate(lengths)]
    return [(from_s + n, Scripted(script, f"{name}-{n}")) for n in range(count)]


def run(shares: bool, first: Iterable[object], second: Iterable[object]) -> dict[str, Outcome]:
    plans = {"first": first, "second": second}
    models = {name: Model(SYSTEM, SCALES, plan) for name, plan in plans.items()}  # type: ignore[arg-type]
    return simulate_sharing(models, GPUS, shares=shares)


def idle_and_busy(shares: bool) -> dict[str, Outcome]:
    """The first model's conversations pause for half an hour, while the second one gets many."""
    idle = conversations("idle", 18, 0.0, 1800.0, turns=2)
    return run(shares, idle, conversations("busy", 24, 300.0, 20.0, turns=12))


def test_an_idle_model_gives_its_gpus_to_one_that_queues() -> None:
    before, after = idle_and_busy(shares=False), idle_and_busy(shares=True)
    assert [max(one.engines) for one in before.values()] == [2, 1]
    assert [max(one.engines) for one in after.values()] == [2, 2]
    for found in (before, after):
        assert {name: one.result.conversations for name, one in found.items()} == {
            "first": {"completed": 18}, "second": {"completed": 24},
        }  # fmt: skip
    waits = [found["second"].result.latencies["ttfet"].p95 for found in (before, after)]
    assert waits[1] < waits[0]


@pytest.mark.parametrize("shares", [False, True])
def test_no_model_has_less_than_its_least_and_all_no_more_than_there_are(shares: bool) -> None:
    found = idle_and_busy(shares)
    each = [one.engines for one in found.values()]
    assert len({*map(len, each)}) == 1
    assert min(map(min, each)) == 1
    assert max(map(sum, zip(*each, strict=True))) <= GPUS
    assert found == idle_and_busy(shares)


def test_a_single_model_follows_its_load() -> None:
    """Up while its conversations are at work, and down once they have ended."""
    late = [(2000.0, Scripted([(100, 0, 1, 0.0)], "late"))]
    plan = [*conversations("c", 18, 0.0, 5.0, turns=20), *late]
    found = simulate_sharing({"only": Model(SYSTEM, SCALES, plan)}, 9, shares=False)["only"]
    assert (found.engines[0], max(found.engines)) == (1, 3)
    assert {*found.engines[300:1900]} == {1}
    # An engine that starts takes its time.
    assert found.engines.index(2) < 60
    assert found.starts >= 2


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(
        SimulationError, match="2 GPUs are the least for these models, and there are 1"
    ):
        simulate_sharing({name: Model(SYSTEM, SCALES, []) for name in "ab"}, 1, shares=True)
    with pytest.raises(SimulationError, match="first has no turns"):
        run(False, [], conversations("c", 1, 0.0, 1.0))


def test_the_pool_counts_gpus_and_not_engines() -> None:
    """Each engine has two of five GPUs, so that there is never room for a third one."""
    models = {
        name: Model(SYSTEM, settings(num_gpus=2), conversations(name, 18, from_s, 5.0, turns=20))
        for name, from_s in (("first", 0.0), ("second", 900.0))
    }
    found = simulate_sharing(models, 5, shares=True)
    both = map(sum, zip(*(one.engines for one in found.values()), strict=True))
    assert {*both} == {2}
    assert {one.result.conversations["completed"] for one in found.values()} == {18}
    models = {name: replace(model, plan=[]) for name, model in models.items()}
    with pytest.raises(SimulationError, match="4 GPUs are the least"):
        simulate_sharing(models, 3, shares=True)


class Watched:
    """A model alone, with a look at its cluster every second."""

    def __init__(
        self, plan: Iterable[tuple[float, Scripted]], scales: Settings = SCALES, step_s: float = 0.1
    ) -> None:
        system = replace(SYSTEM, decoders=(replace(COST, step_s=step_s),))
        self.cluster = ScalingCluster(Model(system, scales, plan), lambda: None)
        self.cluster.start(plan)
        self.now_s = 0

    def until(self, happens: Callable[[ScalingCluster], bool]) -> int:
        """Run until this happens; returns when."""
        while not happens(self.cluster):
            self.now_s += 1
            assert self.now_s < 5_000
            self.cluster.advance(self.now_s)
            self.cluster.look(self.now_s, None, 3 - self.cluster.gpus)
        return self.now_s


def test_an_engine_serves_once_it_has_started_and_then_takes_what_waits() -> None:
    watched = Watched(conversations("c", 12, 0.0, 5.0, turns=40))
    asked_s = watched.until(lambda cluster: cluster.starts > 0)
    assert len(watched.cluster.decoders) == 1
    assert watched.until(lambda cluster: len(cluster.decoders) > 1) == asked_s + 60
    started_s = watched.now_s
    waits = watched.until(lambda cluster: cluster.table.decoders["decoder-1"].conversations > 0)
    assert waits <= started_s + 1


def test_a_start_that_is_not_needed_any_more_is_cancelled() -> None:
    """All have ended long before an engine could have started."""
    late = [(1000.0, Scripted([(100, 0, 1, 0.0)], "late"))]
    short = conversations("c", 12, 0.0, 0.0, turns=1)
    watched = Watched([*short, *late], settings(drain_timeout_s=50.0), COST.step_s)
    watched.cluster.autoscaler.wanted["decoder"].scaling = Scaling(3)
    watched.until(lambda cluster: cluster.starts == 2)
    assert watched.until(lambda cluster: not cluster.open) >= 1000
    assert watched.cluster.starts == 2
    assert [*watched.cluster.decoders] == ["decoder-0"]


def test_engines_are_kept_for_conversations_that_arrive_and_end_quickly() -> None:
    """Once they have ended none is held, and the rate at which they came still counts."""
    late = [(200.0, Scripted([(100, 0, 1, 0.0)], "late"))]
    watched = Watched([*conversations("c", 30, 0.0, 0.0, turns=1), *late], step_s=COST.step_s)
    decoder = watched.cluster.autoscaler.wanted["decoder"]
    at_s = watched.until(lambda _: decoder.need is not None and decoder.need.signal == "arrivals")
    assert at_s < 100


def leaving(last: Scripted) -> Watched:
    """One engine leaves that has nothing but this conversation; two more come while it does."""
    watched = Watched([(0.0, last), *conversations("after", 2, 150.0, 20.0)])
    watched.cluster.autoscaler.wanted["decoder"].scaling = Scaling(2)
    watched.until(lambda cluster: cluster.table.decoders["decoder-0"].leaving)
    assert watched.cluster.table.decoders["decoder-0"].conversations == 1
    return watched


def test_an_engine_that_leaves_keeps_its_gpu_until_its_turns_have_ended() -> None:
    """A turn of 800 seconds outlasts the drain timeout of 300."""
    watched = leaving(Scripted([(3_000, 0, 8_000, 0.0)], "last"))
    held: list[int] = []

    def gone(cluster: ScalingCluster) -> bool:
        if (engine := cluster.table.decoders.get("decoder-0")) is None:
            return True
        held.append(engine.conversations)
        return False

    assert watched.until(gone) >= 800
    # And it gets nothing new, though conversations arrive.
    assert {*held} == {1}
    assert watched.cluster.turns > 0


def test_an_engine_that_leaves_gives_up_idle_conversations_after_the_drain_timeout() -> None:
    turns = [(3_000, 0, 50, 0.0), (3_100, 3_000, 50, 1_800.0)]
    watched = leaving(Scripted(turns, "last"))
    since_s = watched.now_s
    assert watched.until(lambda cluster: "decoder-0" not in cluster.decoders) == since_s + 300
    # Its next turn runs on the engine that stayed.
    watched.until(lambda cluster: not cluster.open)
    assert watched.cluster.tally.result().conversations == {"completed": 3}


def test_idle_conversations_move_at_once_if_the_engine_gets_a_successor() -> None:
    turns = [(3_000, 0, 50, 0.0), (3_100, 3_000, 50, 1_800.0)]
    watched = leaving(Scripted(turns, "last"))
    watched.cluster.autoscaler.wanted["decoder"].scaling = Scaling(2, watched.now_s)
    since_s = watched.now_s
    assert watched.until(lambda cluster: "decoder-0" not in cluster.decoders) <= since_s + 2
