"""A decoder's lane beside its steps: on all SMs of the GPU, and each on its side of the border."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.acceptance.gpu.conftest import ANSWER_TOKENS, new_prompt, prompt_name
from tests.engines.applications import GPU_LANE, GPU_LANE_SLOTS
from tests.engines.client import engines
from tests.engines.engine_calls import complete
from tests.engines.metrics import metric
from tests.engines.streams import Put
from tests.engines.waiting import eventually

pytestmark = pytest.mark.anyio

_ON_SLOTS = [pytest.mark.step("lane on slots"), pytest.mark.application(GPU_LANE_SLOTS)]
_ON_ALL = [pytest.mark.step("lane"), pytest.mark.application(GPU_LANE)]
_BESIDE_TOKENS = 2_000


@pytest.mark.parametrize("tokens", [4_500, 16_000])
@pytest.mark.parametrize(
    "on", [pytest.param("all SMs", marks=_ON_ALL), pytest.param("its slots", marks=_ON_SLOTS)]
)
async def test_answers_are_a_lone_engines(
    alone: dict[str, str], application: str, figure: Put, on: str, tokens: int
) -> None:
    """A new prompt goes to the decoder itself, while another answer is generated."""
    (decoder,) = engines("decoder")
    name = prompt_name(tokens, 0)
    before = metric("conserve_engine_lane_computed_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        prompt = new_prompt(f"beside {name}", 200)
        beside = pool.submit(complete, decoder["url"], prompt, _BESIDE_TOKENS)
        await eventually(
            "the other answer is generated",
            lambda: metric("conserve_engine_running_kinds", kind="decode") > 0,
        )
        taken = complete(decoder["url"], new_prompt(name, tokens), ANSWER_TOKENS)
        assert beside.result().text
    assert taken.text == alone[name]
    await eventually(
        "the lane computed it",
        lambda: metric("conserve_engine_lane_computed_tokens_total") >= before + tokens - 1,
    )
    assert metric("conserve_engine_lane_prefills_total", outcome="failed") == 0
    figure(f"time to first tokens of {tokens:,}, lane on {on}", taken.took_s * 1e3, "ms")
