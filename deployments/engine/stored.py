"""Tells an answer that its prompt is stored.

Workers store KV beside the steps that follow (`stores`). At a request's end its router has a
decoder look for the prompt, and the table counts a history as parked. So its last output is held
back until every worker has stored its part.

vLLM would report a store only with another step's outputs. So each worker reports it by a datagram
to the process of the engine's client, which is on its node.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from conserve.wire import PARK, STORED_TO

logger = logging.getLogger("ray.serve")

# A socket's name and a request's number; a list once it has been sent.
Address = Sequence[Any]

# After that an answer ends although its prompt is not stored.
STORE_TIMEOUT_S = 30.0
# How often a waiting answer checks whether the engine lives.
_LOOKS_EVERY_S = 1.0
_MOST_BYTES = 64


def tell_stored(address: Address, workers: int) -> None:
    """Tell that this worker, one of ``workers``, has stored its part of a prompt or failed to."""
    name, number = address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # Linux keeps few datagrams for a socket that is not read.
            sender.settimeout(STORE_TIMEOUT_S)
            sender.sendto(msgspec.msgpack.encode((number, workers)), b"\0" + name.encode())
    except OSError as error:
        logger.warning(
            "cannot tell an answer that its prompt is stored (%s): it may end %g s late",
            error, STORE_TIMEOUT_S,
        )  # fmt: skip


@dataclass(slots=True)
class Stored:
    """The prompt of a request, for each choice, and where workers tell that it is stored."""

    address: Address
    prompts: int
    heard: int = 0
    tells: Callable[[], None] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, workers: int) -> None:
        self.heard += 1
        if self.heard >= self.prompts * workers and not self.done.is_set():
            self.done.set()
            if self.tells is not None:
                self.tells()


class StoredPrompts:
    """Ends an ``AsyncLLM``'s requests that store their prompt only when it is stored.

    Workers tell so on a socket without a file. After ``timeout_s`` the answer ends all the same,
    and a decoder computes the prompt again.
    """

    def __init__(self, client: Any, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self._client, self._generate, self._timeout_s = client, client.generate, timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind("")
        self._name = self._socket.getsockname()[1:].decode()
        self._numbers = itertools.count()
        self._expected: dict[int, Stored] = {}
        self._listening = False

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        tells: Callable[[], None] | None = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """Return what the client's ``generate`` would; its last output may be held back.

        ``tells`` is called once the prompt is stored.
        """
        run = functools.partial(self._generate, prompt, sampling_params, request_id, **options)
        told = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        return self._hold(run, sampling_params, request_id, tells) if told.get(PARK) else run()

    async def _hold(
        self,
        run: Callable[[], Any],
        sampling_params: Any,
        request_id: str,
        tells: Callable[[], None] | None,
    ) -> AsyncIterator[Any]:
        extra = sampling_params.extra_args
        with self._expect(sampling_params.n) as stored:
            stored.tells = tells
            told = {**extra["kv_transfer_params"], STORED_TO: list(stored.address)}
            sampling_params.extra_args = {**extra, "kv_transfer_params": told}
            async with contextlib.aclosing(run()) as stream:
                async for output in stream:
                    aborted = any(one.finish_reason == "abort" for one in output.outputs)
                    if output.finished and not aborted:
                        await self._wait(stored, request_id)
                    yield output

    async def _wait(self, stored: Stored, request_id: str) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        while (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stored.done.wait(), min(left_s, _LOOKS_EVERY_S))
                return
            if self._client.errored:
                raise self._client.dead_error
        logger.warning(
            "KV of request %s may not be stored: LMCache has not answered in %g s",
            request_id, self._timeout_s,
        )  # fmt: skip

    @contextlib.contextmanager
    def _expect(self, prompts: int) -> Iterator[Stored]:
        if not self._listening:
            asyncio.get_running_loop().add_reader(self._socket, self._hear)
            self._listening = True
        number = next(self._numbers)
        self._expected[number] = stored = Stored((self._name, number), prompts)
        try:
            yield stored
        finally:
            del self._expected[number]

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                number, workers = msgspec.msgpack.decode(self._socket.recv(_MOST_BYTES))
                stored = self._expected.get(number)
                # None if the request's client has left.
                if stored is not None:
                    stored.hear(workers)
