"""Tells what calls wait for before they run."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus

from conserve.engine_scheduling import WaitFor
from deployments.engine.scheduler.turn import Turn


class Waits:
    """Looks at those who wait, each time the scheduler orders them, and notes what for.

    A queue moves from its head: what the first one of a step is refused for, those behind it wait
    for, too.

    Args:
        turns: by request.
    """

    def __init__(self, turns: dict[str, Turn]) -> None:
        self._turns = turns
        self._seen_s: float | None = None
        self._refused = False

    def new_step(self) -> None:
        """Nobody has been refused room yet."""
        self._refused = False

    def no_room(self) -> None:
        """There is not enough KV free for who is next."""
        self._refused = True

    def look(self, scheduler: Any, waiting: Iterable[Any], now_s: float) -> None:
        """A step has been scheduled, and these were left out."""
        waited_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        left: WaitFor = "step"
        if self._refused:
            left = "room"
        elif len(scheduler.running) >= scheduler.max_num_running_reqs:
            left = "place"
        for request in waiting:
            turn = self._turns[request.request_id]
            loads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            # Who came after the last look has waited since then.
            turn.waits("load" if loads else left, min(waited_s, max(0.0, now_s - turn.since_s)))

    def nobody(self) -> None:
        """Nobody waits: the time until somebody does is not waited through."""
        self._seen_s = None
