"""A small run of `make test-agents`: agents with tools, and one process of each kind killed."""

import httpx
import pytest

from tests.engines.applications import TOOLS
from tests.engines.conserve_tools.many import Ground, run
from tests.engines.stage import Stage

AGENTS, AT_ONCE = 24, 6


@pytest.mark.long
@pytest.mark.application(TOOLS, last=True)
def test_agents_with_tools_while_processes_die(application: str, stage: Stage) -> None:
    ground = Ground.now()
    seen = run(application, AGENTS, AT_ONCE, stage.wait_until_whole)
    assert seen.failures == []
    assert seen.kills == ["manager", "table", "router", "decoder"]
    stage.wait_until_whole()
    assert ground.left() == []
    # One that was ended in the second before the table was killed may be back, without its tools.
    assert httpx.get(f"{application}/v1/conversations", timeout=30).json()["total"] <= AT_ONCE
