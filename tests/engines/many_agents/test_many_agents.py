"""1,000 agents with real tools; one process of each kind is killed.

`make test-agents` runs this; `make test-long` has a small run, in `tests/engines/conserve_tools`.
"""

import logging

import httpx
import pytest

from tests.engines.applications import TOOLS
from tests.engines.conserve_tools.many import Ground, run
from tests.engines.stage import Stage

logger = logging.getLogger(__name__)
AGENTS, AT_ONCE = 1000, 16


@pytest.mark.application(TOOLS, last=True)
def test_a_thousand_agents(application: str, stage: Stage) -> None:
    ground = Ground.now()
    seen = run(application, AGENTS, AT_ONCE, stage.wait_until_whole)
    logger.info("%d done, %d commands cut and run again", seen.done, seen.cut)
    assert seen.failures == []
    assert seen.kills == ["manager", "table", "router", "decoder"]
    stage.wait_until_whole()
    assert ground.left() == []
    # One that was ended in the second before the table was killed may be back, without its tools.
    assert httpx.get(f"{application}/v1/conversations", timeout=30).json()["total"] <= AT_ONCE
