"""Decides for how long an engine waits for KV: to be announced, and to be loaded."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

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


# A server that answers no load hangs once one is open for this long, beyond the time in which its
# tokens are computed; one that answers others, after `LOST_S`.
HANGS_S, LOST_S = 30.0, 120.0


@dataclass(slots=True)
class Loads:
    """Knows which loads take so long that LMCache's server has to be killed; asked with each step.

    Only then can no late write land in another request's KV on a GPU. LMCache 0.5.6 sends no answer
    where a copy never ends, or its handler fails (LMCache#4516). While no step ends, no time
    counts, since no load is sent.
    """

    clock: Callable[[], float] = time.monotonic
    # When each began, and for how long its tokens would be computed.
    _open: dict[str, tuple[float, float]] = field(default_factory=dict)
    _now_s: float = 0.0
    _answered_s: float = -HANGS_S
    _looked_s: float = 0.0

    def begin(self, request_id: str, computing_s: float) -> None:
        self._open[request_id] = self._now_s, min(computing_s, LOST_S)

    def end(self, request_ids: Collection[str]) -> None:
        if self._open.keys() & request_ids:
            self._answered_s = self._now_s
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def overdue(self) -> list[float]:
        """Return for how many seconds each such load has waited; of each, once in `HANGS_S`."""
        looked_s, self._looked_s = self._looked_s, self.clock()
        self._now_s = now_s = self._now_s + min(1.0, self._looked_s - looked_s)
        bound_s = HANGS_S if now_s - self._answered_s >= HANGS_S else LOST_S
        waits = {
            request_id: now_s - began_s
            for request_id, (began_s, computing_s) in self._open.items()
            if now_s - began_s >= bound_s + computing_s
        }
        self._open |= dict.fromkeys(waits, (now_s, 0.0))
        return list(waits.values())
