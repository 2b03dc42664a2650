"""Answers of requests that store their prompt: they end when every worker has stored it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from conserve import wire
from deployments.engine.stored import StoredPrompts, tell_stored

# A wrong store of answers may wait for ever.
pytestmark = pytest.mark.timeout(120)


class Client:
    """An ``AsyncLLM`` whose requests put out two tokens; they end when their prompts are stored.

    Attributes:
        plain: its way to generate, which holds nothing back.
        seen: tokens that were put out by `run`.
    """

    def __init__(self, finish_reason: str = "length", **more: Any) -> None:
        self.finish_reason = finish_reason
        self.asked: list[Any] = []
        self.seen: list[int] = []
        self.errored, self.dead_error = False, RuntimeError("dead")
        self.closed = 0
        self.plain = self.generate
        self.generate = StoredPrompts(self, **more).generate  # type: ignore[method-assign]

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        self.asked.append((sampling_params.extra_args or {}).get("kv_transfer_params") or {})
        try:
            for token in range(2):
                last = token == 1
                choice = SimpleNamespace(finish_reason=self.finish_reason if last else None)
                yield SimpleNamespace(token=token, finished=last, outputs=[choice])
        finally:
            self.closed += 1

    async def run(self, **params: Any) -> None:
        async for output in self.generate("prompt", _params(**params), "r"):
            self.seen.append(output.token)


def _params(park: bool = True, n: int = 1) -> Any:
    extra = {"kv_transfer_params": wire.transfer_params(park=park)}
    return SamplingParams(n=n, max_tokens=2, extra_args=extra)


async def _until(holds: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(("workers", "choices"), [(1, 1), (2, 1), (2, 3)])
async def test_an_answer_ends_when_every_worker_has_stored_its_prompt(
    workers: int, choices: int
) -> None:
    client = Client()
    answer = asyncio.create_task(client.run(n=choices))
    await _until(lambda: client.seen == [0])
    address = client.asked[0][wire.STORED_TO]
    # As it comes from another process: a list, in whatever thread.
    for _ in range(workers * choices - 1):
        threading.Thread(target=tell_stored, args=(address, workers)).start()
    # Nor does that of another request count.
    tell_stored([address[0], address[1] + 1], 1)
    await asyncio.sleep(0.2)
    assert client.seen == [0]
    assert not answer.done()
    tell_stored(address, workers)
    await answer
    assert client.seen == [0, 1]


async def test_what_was_stored_before_the_answer_ends_holds_nothing_back() -> None:
    client = Client()
    stream = client.generate("prompt", _params(), "r")
    async for output in stream:
        client.seen.append(output.token)
        if not output.finished:
            tell_stored(client.asked[0][wire.STORED_TO], 1)
    assert client.seen == [0, 1]


async def test_no_word_is_lost_while_the_process_does_something_else() -> None:
    """More than Linux keeps for a socket that is not read."""
    client, many = Client(), 40
    answer = asyncio.create_task(client.run(n=many))
    await _until(lambda: client.seen == [0])
    address = client.asked[0][wire.STORED_TO]

    def tell() -> None:
        for _ in range(many):
            tell_stored(address, 1)

    telling = threading.Thread(target=tell)
    telling.start()
    # Nothing is read meanwhile.
    telling.join(0.2)
    await answer
    telling.join()
    assert client.seen == [0, 1]


async def test_a_turn_that_stores_nothing_passes_as_it_is() -> None:
    client = Client()
    given = "prompt", _params(park=False), "r"
    # Not a generator more for each of its tokens.
    assert client.generate(*given).ag_code is client.plain(*given).ag_code
    await client.run(park=False)
    assert client.seen == [0, 1]
    assert wire.STORED_TO not in client.asked[-1]


async def test_a_store_that_is_not_answered_holds_nothing_back_for_ever() -> None:
    client = Client(timeout_s=0.05)
    await client.run()
    assert client.seen == [0, 1]


async def test_an_engine_that_has_died_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.engine.stored._LOOKS_EVERY_S", 0.01)
    client = Client()
    client.errored = True
    with pytest.raises(RuntimeError, match="dead"):
        await client.run()
    assert client.seen == [0]


async def test_what_the_engine_aborts_ends_at_once() -> None:
    client = Client("abort")
    await client.run()
    assert client.seen == [0, 1]


async def test_a_client_that_leaves_is_not_waited_for() -> None:
    client = Client()
    answer = asyncio.create_task(client.run())
    await _until(lambda: client.seen == [0])
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await _until(lambda: client.closed == 1)
    # Its word comes all the same, and the next answer's after it.
    name, number = client.asked[0][wire.STORED_TO]
    tell_stored([name, number], 1)
    again = asyncio.create_task(client.run())
    await _until(lambda: client.seen == [0, 0])
    tell_stored(client.asked[1][wire.STORED_TO], 1)
    await again
    assert client.seen == [0, 0, 1]


async def test_nobody_who_hears_is_no_failure() -> None:
    tell_stored(["nobody-has-this-name", 0], 1)


async def test_a_prompt_is_told_as_stored_once_and_long_before_its_answer_ends() -> None:
    client, told = Client(), []
    stream = client.generate("prompt", _params(n=2), "r", tells=lambda: told.append(1))
    async for output in stream:
        if not output.finished:
            for expected in (0, 1):
                tell_stored(client.asked[0][wire.STORED_TO], 1)
                await asyncio.sleep(0.05)
                assert len(told) == expected
    assert len(told) == 1
