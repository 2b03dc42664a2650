"""A prefiller on three tenths of one card's SMs and a decoder on seven, with CUDA graphs."""

import pytest

from tests.engines.applications import GPU_SLOTS
from tests.engines.client import engines
from tests.engines.gpu.card import NEEDS_GPU, seen
from tests.engines.gpu.conftest import ANSWER_TOKENS, new_prompt, prompt_name
from tests.engines.gpu.engine import complete, compute, whole_chunks
from tests.engines.metrics import metric
from tests.engines.processes import kill
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [NEEDS_GPU, pytest.mark.anyio, pytest.mark.application(GPU_SLOTS)]

BACK_S = 300.0


def test_engines_have_their_slots(application: str) -> None:
    found = {engine["role"]: engine for engine in engines()}
    slots = {role: engine["sm_slots"] for role, engine in found.items()}
    assert slots == {"prefiller": 3, "decoder": 7}
    assert found["prefiller"]["sms"] < found["decoder"]["sms"]
    assert metric("conserve_engine_sm_slots") == 10
    seen.info("SMs: %s", {role: engine["sms"] for role, engine in found.items()})


@pytest.mark.parametrize("tokens", [4_500, 16_000])
def test_answers_on_slots_are_a_lone_engines(
    alone: dict[str, str], application: str, tokens: int
) -> None:
    """Handed over whole through LMCache, token for token."""
    (prefiller,), (decoder,) = engines("prefiller"), engines("decoder")
    name = prompt_name(tokens, 0)
    prompt = new_prompt(name, tokens)
    computed = compute(prefiller["url"], prompt)
    taken = complete(decoder["url"], prompt, ANSWER_TOKENS, prefilled=True)
    assert computed.found_tokens == 0
    assert taken.found_tokens == whole_chunks(prompt)
    assert taken.text == alone[name]
    seen.info("%d tokens computed in %.0f ms on slots", tokens, computed.took_s * 1e3)


@pytest.mark.application(GPU_SLOTS, last=True)
async def test_a_killed_engines_slots_are_its_successors(application: str, stage: Stage) -> None:
    (engine,) = engines("decoder")
    kill(engine["pid"])
    await eventually(
        "it is missed",
        lambda: engine["id"] not in [one["id"] for one in engines("decoder")],
        timeout_s=120,
    )
    stage.wait_until_whole(BACK_S)
    (successor,) = engines("decoder")
    assert (successor["sm_slots"], successor["sms"]) == (7, engine["sms"])
