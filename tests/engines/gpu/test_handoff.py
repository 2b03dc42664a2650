"""KV from a prefiller to a decoder on the same GPU: whole, at once, and with what it takes."""

import statistics
import time

import pytest

from tests.engines.applications import GPU
from tests.engines.client import engines
from tests.engines.gpu.card import NEEDS_GPU, seen
from tests.engines.gpu.conftest import ANSWER_TOKENS, PAUSES_MS, SIZES, new_prompt, prompt_name
from tests.engines.gpu.engine import complete, compute, whole_chunks

pytestmark = [NEEDS_GPU, pytest.mark.application(GPU)]

ROUNDS = 20


def _urls() -> tuple[str, str]:
    (prefiller,), (decoder,) = engines("prefiller"), engines("decoder")
    return prefiller["url"], decoder["url"]


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("pause_ms", PAUSES_MS)
def test_a_prompt_is_taken_over_whole(
    alone: dict[str, str], application: str, tokens: int, pause_ms: int
) -> None:
    """Every whole chunk, and with it a lone engine's answer, token for token."""
    prefiller, decoder = _urls()
    name = prompt_name(tokens, pause_ms)
    prompt = new_prompt(name, tokens)
    computed = compute(prefiller, prompt)
    time.sleep(pause_ms / 1e3)
    taken = complete(decoder, prompt, ANSWER_TOKENS, prefilled=True)
    assert computed.found_tokens == 0
    assert taken.found_tokens == whole_chunks(prompt)
    assert taken.text == alone[name]


@pytest.mark.parametrize("tokens", SIZES)
def test_taking_against_computing(application: str, tokens: int) -> None:
    """What the first token of a prompt takes, by the median of three; printed alone."""
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
    seen.info(
        "first token of %d: %.0f ms taking, %.0f ms computing", tokens,
        statistics.median(taking_s) * 1e3, statistics.median(computing_s) * 1e3,
    )  # fmt: skip


@pytest.mark.parametrize("pause_ms", PAUSES_MS)
def test_how_many_handoffs_are_whole(application: str, pause_ms: int) -> None:
    """Of many of 1,000 to 9,000 tokens, one after the other: all."""
    prefiller, decoder = _urls()
    missed = []
    for number in range(ROUNDS):
        prompt = new_prompt(f"round {number}, {pause_ms}", 1000 + 400 * number)
        compute(prefiller, prompt)
        time.sleep(pause_ms / 1e3)
        found = complete(decoder, prompt, 1, prefilled=True).found_tokens
        if found != whole_chunks(prompt):
            missed.append((found, whole_chunks(prompt)))
    seen.info("%d of %d handoffs whole after %d ms", ROUNDS - len(missed), ROUNDS, pause_ms)
    assert missed == []
