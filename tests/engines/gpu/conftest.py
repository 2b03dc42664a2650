"""Fixtures of tests on a GPU."""

import random

import pytest

from tests.engines.applications import GPU
from tests.engines.gpu.engine import complete
from tests.engines.lone import LONE_PORT, lone_engine, wait_for_lone
from tests.engines.stage import Stage

SIZES = (4_500, 16_000, 32_000)
PAUSES_MS = (0, 20)
ANSWER_TOKENS = 16
# Ids of plain tokens: those of the template come before and after.
_LOWEST_ID, _HIGHEST_ID = 300, 3_900


def new_prompt(seed: str, tokens: int) -> list[int]:
    """A prompt that begins like no other."""
    rng = random.Random(seed)
    return [rng.randrange(_LOWEST_ID, _HIGHEST_ID) for _ in range(tokens)]


@pytest.fixture(scope="session")
def alone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a lone engine answers to each prompt of the handoff's tests, by its name.

    It runs before the application does, which takes the GPU for itself.
    """
    stage.clear()
    logs = tmp_path_factory.mktemp("lone")
    engine = lone_engine(logs / "lone.log", stage.model_of(GPU), gpu=True)
    try:
        wait_for_lone(engine, logs)
        found = {}
        for tokens in SIZES:
            for pause_ms in PAUSES_MS:
                name = prompt_name(tokens, pause_ms)
                url = f"http://127.0.0.1:{LONE_PORT}"
                found[name] = complete(url, new_prompt(name, tokens), ANSWER_TOKENS).text
    finally:
        engine.stop()
    return found


def prompt_name(tokens: int, pause_ms: int) -> str:
    """Of the prompt of one test."""
    return f"{tokens} tokens, after {pause_ms} ms"
