"""Fixtures of tests on a GPU, and the order in which they run."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.gpu.card import missing
from tests.acceptance.gpu.plugin import GpuSteps
from tests.engines.applications import GPU, Application
from tests.engines.client import engines
from tests.engines.engine_calls import Completion, complete, compute, whole_chunks
from tests.engines.lone import LONE_PORT, lone_engine, wait_for_lone
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

SIZES = (4_500, 16_000, 32_000)
PAUSES_MS = (0, 20)
ANSWER_TOKENS = 16
# LMCache lets go of a dead engine's KV within 40 s; then the next one loads.
_BACK_S = 300.0
# Ids of plain tokens: those of the template come before and after.
_LOWEST_ID, _HIGHEST_ID = 300, 3_900


def pytest_configure(config: pytest.Config) -> None:
    page = config.getoption("gpu_page", None)
    config.pluginmanager.register(GpuSteps(missing(), page), "gpu-steps")


def new_prompt(seed: str, tokens: int) -> list[int]:
    """A prompt that begins like no other."""
    rng = random.Random(seed)
    return [rng.randrange(_LOWEST_ID, _HIGHEST_ID) for _ in range(tokens)]


@pytest.fixture(scope="session")
def alone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a lone engine answers to each prompt of the handoff's tests, by its name.

    It runs before the application does, which takes the GPU for itself.
    """
    names = [prompt_name(tokens, pause_ms) for tokens in SIZES for pause_ms in PAUSES_MS]
    sizes = [tokens for tokens in SIZES for _ in PAUSES_MS]
    with lone_on_gpu(stage, tmp_path_factory.mktemp("lone"), GPU) as url:
        return {
            name: complete(url, new_prompt(name, tokens), ANSWER_TOKENS).text
            for name, tokens in zip(names, sizes, strict=True)
        }


@contextmanager
def lone_on_gpu(stage: Stage, logs: Path, application: Application) -> Iterator[str]:
    """Serve an application's model by vLLM alone, while the application is down; yield the URL."""
    stage.clear()
    engine = lone_engine(logs / "lone.log", stage.model_of(application), gpu=True)
    try:
        wait_for_lone(engine, logs)
        yield f"http://127.0.0.1:{LONE_PORT}"
    finally:
        engine.stop()


def prompt_name(tokens: int, pause_ms: int) -> str:
    """Return the name of one test's prompt."""
    return f"{tokens} tokens, after {pause_ms} ms"


def hands_over(
    giver: str, taker: str, alone: dict[str, str], tokens: int, pause_ms: int = 0
) -> Completion:
    """Compute a prompt on ``giver``, and check that ``taker`` finds every whole chunk of it.

    The answer has to be the lone engine's, token for token.
    """
    name = prompt_name(tokens, pause_ms)
    prompt = new_prompt(name, tokens)
    computed = compute(giver, prompt)
    time.sleep(pause_ms / 1e3)
    taken = complete(taker, prompt, ANSWER_TOKENS, prefilled=True)
    assert computed.found_tokens == 0
    assert taken.found_tokens == whole_chunks(prompt)
    assert taken.text == alone[name]
    return computed


async def is_replaced(stage: Stage, engine: dict[str, Any]) -> float:
    """Wait for a killed engine's successor; return the seconds until the engine was missed."""
    started_s = time.monotonic()
    await eventually(
        "the engine is missed",
        lambda: engine["id"] not in [one["id"] for one in engines()],
        timeout_s=120,
    )
    missed_s = time.monotonic() - started_s
    stage.wait_until_whole(_BACK_S)
    return missed_s
