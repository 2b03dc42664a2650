"""Another vLLM is refused, in one line that says what to do."""

from typing import Any

import pytest

from deployments.engine.scheduler import doors
from deployments.engine.scheduler.doors import require_doors


def test_this_vllm_is_as_expected() -> None:
    require_doors()


def test_another_signature_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def _free_blocks(self: Any, request: Any, now: bool) -> None:
        """As another vLLM might have it."""

    monkeypatch.setattr(Scheduler, "_free_blocks", _free_blocks)
    with pytest.raises(RuntimeError) as refused:
        require_doors()
    said = str(refused.value)
    assert "_free_blocks(self, request, now)" in said
    assert "engine_scheduler=vllm" in said
    assert "\n" not in said


def test_a_method_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.delattr(BlockPool, "touch")
    with pytest.raises(RuntimeError, match="touch"):
        require_doors()
    assert doors.MADE_FOR == "0.32"
