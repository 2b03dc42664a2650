"""Stores that a worker has asked LMCache's server for, and when their blocks are free.

On a GPU the server copies from the engine's own memory, after the step that computed it. Until then
nobody else may write there.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from lmcache.logging import init_logger

logger = init_logger(__name__)

# A server that hangs is killed before that (deployments/node), which breaks the connection. One
# that lives, and has not answered by then, has failed at the store, and reads nothing.
FORGOTTEN_S = 120.0
_LOOKS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class StepNotes:
    """What the scheduler's connector tells those of the workers with each step.

    Attributes:
        step: counts steps; none is left out.
        last: requests whose prompt's last whole chunk is stored in this step.
        ended: requests that are over, whose blocks are to be kept until their stores are.
    """

    step: int
    last: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()


@dataclass(slots=True)
class Steps:
    """Whether everything that a step builds on was computed.

    A step may be broken off: by a SIGTERM, or an error of its own. With asynchronous scheduling the
    worker may be given others after it, of the same prompts, before the engine ends. What they
    compute is wrong as well.
    """

    done: int = -1
    broken: bool = False

    def begin(self, step: int) -> None:
        """A step is to be computed."""
        if step != self.done + 1 and not self.broken:
            self.broken = True
            logger.error("step %d was not computed: no KV is stored any more", self.done + 1)

    def end(self, step: int) -> None:
        """It has been, to its end."""
        if not self.broken:
            self.done = step


@dataclass(slots=True)
class _Store:
    future: Any
    # CUDA needs the exporting event for as long as the server may wait for it.
    event: Any
    losses: int
    asked_s: float


@dataclass(slots=True)
class Stores:
    """Stores under way, by request.

    Args:
        losses: how often the connection to the server was lost so far.
    """

    losses: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    _open: dict[str, list[_Store]] = field(default_factory=dict)

    def add(self, request_id: str, future: Any, event: Any = None) -> None:
        """The server has been asked for one."""
        store = _Store(future, event, self.losses(), self.clock())
        self._open.setdefault(request_id, []).append(store)

    def under_way(self, request_id: str) -> bool:
        """Whether the server may still read this request's blocks."""
        left = [one for one in self._open.get(request_id, ()) if not self._over(request_id, one)]
        if left:
            self._open[request_id] = left
        else:
            self._open.pop(request_id, None)
        return bool(left)

    def wait(self, requests: Collection[str] | None = None, timeout_s: float = FORGOTTEN_S) -> bool:
        """Wait until the stores of these requests (None: of all) are over; whether they are."""
        deadline_s = self.clock() + timeout_s
        for request_id in list(self._open if requests is None else requests):
            while self.under_way(request_id):
                left_s = deadline_s - self.clock()
                if left_s <= 0:
                    return False
                _wait(self._open[request_id][0].future, min(left_s, _LOOKS_EVERY_S))
        return True

    def _over(self, request_id: str, store: _Store) -> bool:
        if store.losses != self.losses():
            return True
        try:
            if store.future.query():
                if not store.future.result(timeout=0):
                    logger.warning("LMCache has not stored KV of request %s", request_id)
                return True
        except Exception as error:
            logger.warning("LMCache has not stored KV of request %s: %s", request_id, error)
            return True
        if self.clock() - store.asked_s < FORGOTTEN_S:
            return False
        logger.error("LMCache has not answered a store of request %s", request_id)
        return True


def _wait(future: Any, timeout_s: float) -> None:
    try:
        future.wait(timeout_s)
    except Exception:
        logger.debug("a store failed", exc_info=True)  # `under_way` says so.
