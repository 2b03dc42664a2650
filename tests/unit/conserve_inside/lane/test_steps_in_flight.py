"""Random turns with a lane, on vLLM's schedulers with one step and with two in flight."""

import random
import time

import pytest

from tests.unit.conserve_inside.lane.stand_in import LaneStandIn
from tests.unit.conserve_inside.scheduler.play import POLICIES, play
from tests.unit.deployments.engine.stepping import words


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("fails", [0.0, 0.2])
def test_nothing_is_lost(kind: str, fails: float) -> None:
    done = failed = aborted = preempted = 0
    # How many prefills the lane gets through beside steps is up to its thread: six plays, and more
    # until there were enough.
    for seed in range(24):
        if seed >= 6 and done > 20 and aborted and preempted:
            break
        engine = LaneStandIn(kind=kind, policies=POLICIES, fails=fails, seed=seed)
        seen = play(engine, seed)
        aborted, preempted = aborted + seen.aborted, preempted + seen.preempted
        policy = engine.scheduler.lane.policy
        done, failed = done + policy.done, failed + policy.failed
        engine.end()
    assert done > 20
    assert aborted
    assert preempted
    assert (failed > 0) == (fails > 0)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_blocks_that_are_freed_while_the_lane_writes_show(kind: str) -> None:
    """The check above would notice."""
    engine = LaneStandIn(kind=kind, policies=POLICIES)
    chance = random.Random(0)
    for number in range(2):
        engine.add(f"decode{number}", words(chance, 40), 60)
    for _ in range(6):
        engine.step()
    engine.add("long", words(chance, 600))
    while not engine.scheduler.lane.policy.current:
        engine.step()
    request = engine.scheduler.requests["long"]
    engine.scheduler.kv_cache_manager.free(request)
    for _ in range(5_000):
        if engine.spoiled:
            break
        engine.step()
        # The lane's thread is to get to it.
        time.sleep(0.001)
    assert any("writes to it" in one for one in engine.spoiled)
    engine.end()
