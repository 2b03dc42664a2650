"""Prompts that a prefiller has just stored, and that LMCache does not tell of yet.

On a GPU a store is done, for the engine that asked for it, when its copy is. LMCache's server
announces it after that, within 5 ms (it looks for copies that are done so often). A decoder that
asks in between would compute all of the prompt again. So where a prefiller has said that it has
stored a prompt, what is not found is looked up again a few times. Meanwhile the scheduler goes on
with other requests: it is told that the answer is not known yet.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Some 75 ms in all: many times LMCache's own delay, and little beside the prompt's computation.
_PAUSES_S = (0.005, 0.01, 0.02, 0.04)
# A server that takes longer to let go of a look-up hangs.
_FREEING_S = 10.0


@dataclass(slots=True)
class _Wait:
    tries: int = 0
    again_s: float | None = None
    # The server is to have let go of the last look-up before the next.
    freeing: list[Any] = field(default_factory=list)
    missed_tokens: int = 0


@dataclass(slots=True)
class LateKV:
    """Which look-ups are to be repeated, and what came of them."""

    clock: Callable[[], float] = time.monotonic
    _waits: dict[str, _Wait] = field(default_factory=dict)

    def waits(self, request_id: str) -> bool:
        """Whether it is too early for another look-up."""
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

    def looks_again(self, request_id: str, missed_tokens: int) -> bool:
        """Whether a prompt of which so much was not found is to be looked up once more."""
        wait = self._waits.setdefault(request_id, _Wait())
        wait.missed_tokens = missed_tokens
        if not missed_tokens or wait.tries >= len(_PAUSES_S):
            return False
        wait.again_s = self.clock() + _PAUSES_S[wait.tries]
        wait.tries += 1
        return True

    def frees(self, request_id: str, futures: list[Any]) -> None:
        """The server was asked to let go of what the last look-up found."""
        self._waits[request_id].freeing = futures

    def over(self, request_id: str) -> tuple[bool, int]:
        """A request has ended: whether it was looked up again, and what was missed at last."""
        wait = self._waits.pop(request_id, _Wait())
        return wait.tries > 0, wait.missed_tokens
