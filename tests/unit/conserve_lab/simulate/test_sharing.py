"""Several models on one cluster's GPUs: who has how many engines, and who waits."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from conserve_lab.simulate.sharing import Model, Outcome, simulate_sharing
from conserve_lab.simulate.system import SimulationError, System
from tests.unit.conserve_lab.simulate.scenes import COSTS, Scripted

COST = replace(COSTS, capacity_tokens=20_000)
SYSTEM = System("s", "elastic", (), (COST,), pausing=True, host_tokens=400_000)
GPUS = 3


def conversations(
    name: str, count: int, from_s: float, gap_s: float, turns: int = 3
) -> list[tuple[float, Scripted]]:
    """Each has 3,000 tokens, so that an engine has room for six."""
    lengths = (3_000 + 100 * n for n in range(turns))
    script = [(tokens, tokens - 100, 50, gap_s if n else 0.0) for n, tokens in enumerate(lengths)]
    return [(from_s + n, Scripted(script, f"{name}-{n}")) for n in range(count)]


def run(shares: bool, first: Iterable[object], second: Iterable[object]) -> dict[str, Outcome]:
    plans = {"first": first, "second": second}
    models = {name: Model(SYSTEM, 3, plan) for name, plan in plans.items()}  # type: ignore[arg-type]
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
    found = simulate_sharing({"only": Model(SYSTEM, 3, plan)}, 9, shares=False)["only"]
    assert (found.engines[0], max(found.engines)) == (1, 3)
    assert {*found.engines[300:1900]} == {1}
    # An engine that starts takes its time.
    assert found.engines.index(2) < 60
    assert found.starts >= 2


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(SimulationError, match="2 engines are the least, and there are 1 GPUs"):
        simulate_sharing({name: Model(SYSTEM, 3, []) for name in "ab"}, 1, shares=True)
    with pytest.raises(SimulationError, match="first has no turns"):
        run(False, [], conversations("c", 1, 0.0, 1.0))
