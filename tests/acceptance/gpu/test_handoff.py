"""KV from a prefiller to a decoder on the same GPU: whole, at once, and with what it takes."""

import statistics
import time

import pytest

from tests.acceptance.gpu.conftest import PAUSES_MS, SIZES, hands_over, new_prompt
from tests.engines.applications import GPU
from tests.engines.client import engines
from tests.engines.engine_calls import complete, compute, whole_chunks
from tests.engines.streams import Put

pytestmark = [pytest.mark.step("handoffs"), pytest.mark.application(GPU)]

ROUNDS = 20


def _urls() -> tuple[str, str]:
    (prefiller,), (decoder,) = engines("prefiller"), engines("decoder")
    return prefiller["url"], decoder["url"]


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("pause_ms", PAUSES_MS)
def test_a_prompt_is_taken_over_whole(
    alone: dict[str, str], application: str, tokens: int, pause_ms: int
) -> None:
    hands_over(*_urls(), alone, tokens, pause_ms)


@pytest.mark.parametrize("tokens", SIZES)
def test_taking_against_computing(application: str, figure: Put, tokens: int) -> None:
    """Time to the first token of a prompt, found or computed: the median of three."""
    prefiller, decoder = _urls()
    computing_s, taking_s = [], []
    for number in range(3):
        prompt = new_prompt(f"timed {tokens} {number}", tokens)
        compute(prefiller, prompt)
        time.sleep(0.1)
        taken = complete(decoder, prompt, 1, prefilled=True)
        assert taken.found_tokens == whole_chunks(prompt)
        taking_s.append(taken.took_s)
        other = new_prompt(f"untaken {tokens} {number}", tokens)
        computing_s.append(complete(decoder, other, 1).took_s)
    for how, found_s in (("handed over", taking_s), ("computed", computing_s)):
        name = f"time to first token of {tokens:,}, {how}"
        figure(name, statistics.median(found_s) * 1e3, "ms")


@pytest.mark.parametrize("pause_ms", PAUSES_MS)
def test_how_many_handoffs_are_whole(application: str, figure: Put, pause_ms: int) -> None:
    """Prompts of 1,000 to 9,000 tokens, one after the other: all are taken over whole."""
    prefiller, decoder = _urls()
    whole = 0
    for number in range(ROUNDS):
        prompt = new_prompt(f"round {number}, {pause_ms}", 1000 + 400 * number)
        compute(prefiller, prompt)
        time.sleep(pause_ms / 1e3)
        taken = complete(decoder, prompt, 1, prefilled=True)
        whole += taken.found_tokens == whole_chunks(prompt)
    figure(f"whole handoffs of {ROUNDS}, taken after {pause_ms} ms", whole)
    assert whole == ROUNDS
