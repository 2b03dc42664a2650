"""What is stored beside the steps that follow: nobody waits, and nothing is written over."""

import random
import time
from typing import Any

import pytest

from tests.unit.deployments.engine.scheduler.stand_in import words
from tests.unit.deployments.engine.storing import CHUNK_TOKENS, Storing


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_turns_are_stored_as_they_were_computed(
    seed: int, window: bool, two_in_flight: bool
) -> None:
    """With preemptions, prompts that begin alike, clients that leave, and hardly any room."""
    chance = random.Random(seed)
    engine = Storing(blocks=52, takes_steps=4, window=window, two_in_flight=two_in_flight)
    shared = words(chance, 200)
    asked: dict[str, int] = {}
    left = set()
    for number in range(60):
        name = f"r{number}"
        prompt = shared[: chance.choice((0, 0, 100, 200))] + words(chance, chance.randrange(20, 600))
        engine.store(name, prompt, max_tokens=chance.choice((1, 1, 40, 250)))
        asked[name] = len(prompt)
        for _ in range(chance.randrange(5)):
            engine.step()
        if engine.live and chance.random() < 0.15:
            gone = chance.choice(sorted(engine.live))
            engine.abort(gone)
            left.add(gone)
    engine.drain()
    for _ in range(20):
        engine.step()
    assert not engine.wrong
    assert engine.preempted
    assert not engine.spoiled
    stored = {}
    for copy in engine.copies:
        assert copy.done
        stored[copy.request_id] = True
    assert stored.keys() >= {
        one for one, tokens in asked.items() if tokens >= CHUNK_TOKENS and one not in left
    }
    _eventually(lambda: {one for one, _ in engine.told} >= asked.keys() - left)
    assert len(engine.told) == len({one for one, _ in engine.told})
    assert all(done for _, done in engine.told)
    assert not engine.front._to_tell
    assert not engine.front._pins
    engine.require_no_leak()


def _eventually(holds: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
