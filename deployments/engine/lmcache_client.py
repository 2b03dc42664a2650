"""Waits for an LMCache server that starts, and for KV that it is about to announce."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deployments.node.lmcache_server import START_TIMEOUT_S


def wait_for_server(host: str | None, port: int, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for the server, which starts while the engine loads, or raise `RuntimeError`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host or "", port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise RuntimeError(
                    f"no LMCache server at {host}:{port} after {timeout_s:g} s ({error}); see the "
                    "node actor's log"
                ) from None
        time.sleep(0.1)


# Pauses before a prompt is looked up again: 75 ms in all, many times LMCache's own delay, and short
# beside the prompt's computation.
_PAUSES_S = (0.005, 0.01, 0.02, 0.04)
# A server that takes longer to release a look-up hangs.
_FREEING_S = 10.0


@dataclass(slots=True)
class _Wait:
    tries: int = 0
    again_s: float | None = None
    # Releases of the last look-up, which come before the next.
    freeing: list[Any] = field(default_factory=list)
    missed_tokens: int = 0


@dataclass(slots=True)
class LateKV:
    """Looks up again prompts that a prefiller has just stored, and that are not found yet.

    On a GPU a store is done, for the engine that asked for it, when its copy is. LMCache's server
    announces it within 5 ms. A decoder that asks in between would compute the whole prompt again.
    """

    clock: Callable[[], float] = time.monotonic
    _waits: dict[str, _Wait] = field(default_factory=dict)

    def waits(self, request_id: str) -> bool:
        wait = self._waits.get(request_id)
        if wait is None or wait.again_s is None:
            return False
        over_s = self.clock() - wait.again_s
        freed = over_s > _FREEING_S or all(future.query() for future in wait.freeing)
        if over_s < 0 or not freed:
            return True
        wait.again_s = None
        wait.freeing.clear()
        return False

    def looks_again(self, request_id: str, missed_tokens: int, answers: bool = True) -> bool:
        """Return whether to look a prompt up once more, given how much of it was not found.

        ``answers`` is whether LMCache's server does.
        """
        wait = self._waits.setdefault(request_id, _Wait())
        wait.missed_tokens = missed_tokens
        if not missed_tokens or not answers or wait.tries >= len(_PAUSES_S):
            return False
        wait.again_s = self.clock() + _PAUSES_S[wait.tries]
        wait.tries += 1
        return True

    def frees(self, request_id: str, futures: list[Any]) -> None:
        self._waits[request_id].freeing = futures

    def over(self, request_id: str) -> tuple[bool, int]:
        """Return whether an ended request was looked up again, and how many tokens were missed."""
        wait = self._waits.pop(request_id, _Wait())
        return wait.tries > 0, wait.missed_tokens
