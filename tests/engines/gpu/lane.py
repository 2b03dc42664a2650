"""A long prompt beside an answer, on a decoder that has a lane."""

from concurrent.futures import ThreadPoolExecutor

from tests.engines.client import engines
from tests.engines.gpu.card import seen
from tests.engines.gpu.conftest import ANSWER_TOKENS, new_prompt, prompt_name
from tests.engines.gpu.engine import complete
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

_BESIDE_TOKENS = 2_000


async def answers_are_a_lone_engines(alone: dict[str, str], tokens: int, where: str) -> None:
    """A prompt that nobody has seen goes to the decoder itself, while another answer is under way;
    its answer has to be that of an engine without a lane.

    Args:
        where: the lane's kernels run, for whoever reads the log.
    """
    (decoder,) = engines("decoder")
    name = prompt_name(tokens, 0)
    before = metric("conserve_engine_lane_computed_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(
            complete, decoder["url"], new_prompt(f"beside {name}", 200), _BESIDE_TOKENS
        )
        await eventually(
            "somebody decodes",
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
    seen.info("%d tokens in the lane, %s: answered in %.0f ms", tokens, where, taken.took_s * 1e3)
