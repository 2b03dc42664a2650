"""Random turns with a lane, on vLLM's schedulers with one step and with two in flight."""

import pytest

from tests.unit.conserve_inside.lane.stand_in import LaneStandIn
from tests.unit.conserve_inside.scheduler.play import POLICIES, play


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
