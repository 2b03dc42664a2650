"""A sample of `make test-chaos`: misbehaving clients, one decoder and one LMCache server killed."""

import pytest

from tests.acceptance.chaos.answers import compare
from tests.acceptance.chaos.plan import Plan, PlannedKill
from tests.acceptance.chaos.run import run
from tests.acceptance.chaos.tally import Tally
from tests.engines.applications import MAIN
from tests.engines.lone import LONE_PORT
from tests.engines.stage import Stage

pytestmark = [
    pytest.mark.full,
    pytest.mark.application(MAIN, last=True),
]

PLAN = Plan(seed=12, clients=8, duration_s=20, kill_every_s=0)
KILLS = (PlannedKill(4.0, "lmcache", 0.0), PlannedKill(10.0, "decoder", 0.0))


async def test_a_sample_of_chaos(application: str, stage: Stage) -> None:
    """Every conversation ends with the right answers, and all accounts agree."""
    stage.wait_for_lone()
    tally = Tally()
    await run(PLAN, KILLS, application, stage, MAIN.decoders, tally)
    await compare(tally, f"http://127.0.0.1:{LONE_PORT}")
    assert tally.failures == []
    assert tally.kills == {"lmcache": 1, "decoder": 1}
    assert tally.ended >= PLAN.clients
