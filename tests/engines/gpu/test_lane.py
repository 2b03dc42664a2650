"""A decoder's lane beside its steps, both on all SMs of the GPU."""

import pytest

from tests.engines.applications import GPU_LANE
from tests.engines.gpu.card import NEEDS_GPU
from tests.engines.gpu.lane import answers_are_a_lone_engines

pytestmark = [NEEDS_GPU, pytest.mark.anyio, pytest.mark.application(GPU_LANE)]


@pytest.mark.parametrize("tokens", [4_500, 16_000])
async def test_answers_are_a_lone_engines(
    alone: dict[str, str], application: str, tokens: int
) -> None:
    await answers_are_a_lone_engines(alone, tokens, "on all SMs")
