"""What costs much to refuse is refused later."""

import asyncio
import time

import pytest

from conserve.errors import ApiError
from deployments.router import errors


def test_a_cheap_refusal_comes_at_once_and_a_dear_one_later() -> None:
    assert errors.wait_s(0.0) == errors.wait_s(0.025) == 0.0
    assert errors.wait_s(0.125) == pytest.approx(0.4)
    assert errors.wait_s(100.0) == 4.0


@pytest.mark.parametrize(
    ("status", "code", "waits"),
    [
        (400, None, True),
        (422, None, True),
        (429, None, False),
        (503, None, False),
        (404, "model_not_found", False),
        (404, "previous_response_not_found", True),
    ],
)
def test_only_who_is_at_fault_waits(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str | None, waits: bool
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(errors.asyncio, "sleep", sleep)
    asyncio.run(errors.hold_back(ApiError(status, "no", code), time.perf_counter() - 10.0))
    assert slept == ([4.0] if waits else [])
