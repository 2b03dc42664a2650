"""Knows of a request whose turn it is, and how far it has come."""

from dataclasses import dataclass, field
from typing import Any

from conserve.engine_scheduling import Kind, WaitFor
from conserve.wire import TURN


@dataclass(slots=True)
class Turn:
    """One request. Times are of the scheduler's clock.

    Attributes:
        key: its history's; of a request that is nobody's turn, its own id.
        is_known: whether it is a history's turn, of which something is worth keeping.
        since_s: when it came, or was preempted: it waits since then.
        resume_s: in how many seconds after it its client expects the next turn.
        last: whether its client says that it is the last one.
        kind: what it was when it began to run.
        missing_tokens: what caches did not have of it when it came.
        charged_tokens: up to where in its sequence it has been charged.
        runs: whether it has begun to, and was not preempted since.
        waited_s: before it ran, all in all.
        waited_for_s: what for, as far as it was looked at.
    """

    key: str
    is_known: bool
    since_s: float
    resume_s: float | None = None
    last: bool = False
    kind: Kind = "cold"
    missing_tokens: int = 0
    charged_tokens: int = 0
    runs: bool = False
    waited_s: float = 0.0
    waited_for_s: dict[WaitFor, float] = field(default_factory=dict)

    def waits(self, what: WaitFor, for_s: float) -> None:
        """It has waited for something, for so long again."""
        self.waited_for_s[what] = self.waited_for_s.get(what, 0.0) + for_s

    @property
    def waited_for(self) -> WaitFor | None:
        """Return what it has waited for longest; None: it was not seen to wait."""
        return max(self.waited_for_s, key=lambda one: self.waited_for_s[one], default=None)


def turn_of(request: Any, now_s: float) -> Turn:
    """Read what a request says of itself (`conserve.wire.scheduled_turn`)."""
    said = (request.kv_transfer_params or {}).get(TURN)
    if not isinstance(said, dict):
        return Turn(request.request_id, False, now_s)
    return Turn(str(said["key"]), True, now_s, said["resume_s"], bool(said["last"]))
