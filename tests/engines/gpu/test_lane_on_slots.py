"""A decoder's lane beside its steps, each on its side of the decoder's SMs."""

import pytest

from tests.engines.applications import GPU_LANE_SLOTS
from tests.engines.client import engines
from tests.engines.gpu.card import NEEDS_GPU
from tests.engines.gpu.lane import answers_are_a_lone_engines
from tests.engines.metrics import metric

pytestmark = [NEEDS_GPU, pytest.mark.anyio, pytest.mark.application(GPU_LANE_SLOTS)]


@pytest.mark.parametrize("tokens", [4_500, 16_000])
async def test_answers_are_a_lone_engines(
    alone: dict[str, str], application: str, tokens: int
) -> None:
    await answers_are_a_lone_engines(alone, tokens, "on its side of seven tenths of the SMs")


def test_the_border_can_move(application: str) -> None:
    (decoder,) = engines("decoder")
    assert 0 < metric("conserve_engine_decode_sms") <= decoder["sms"]
