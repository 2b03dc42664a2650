"""Keeps the newest events at the boundaries of turns and engines, in order."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

from conserve import identity

Kind = Literal[
    "wait",
    "refuse",
    "place",
    "start",
    "prefilled",
    "end",
    "cut",
    "answered",
    "park",
    "pause",
    "restore",
    "ended",
    "tool_start",
    "tool_end",
    "engine_ready",
    "engine_lost",
    "engine_left",
    "window",
    "environment",
]
"""Of a turn: ``wait`` (for room), ``refuse``, ``place`` (its history, on a decoder), ``start``,
``prefilled`` (remotely), ``end`` or ``cut`` (on its decoder), ``answered`` (as its router saw it).
Of a history: ``park``, ``pause``, ``restore``, ``ended``. Of tools, as clients report them:
``tool_start``, ``tool_end``. The others are of tools' environments, of engines, and of the
admission window."""

KINDS: tuple[str, ...] = get_args(Kind)
MOST_EVENTS = 4096


class Event(NamedTuple):
    """One event; ``history_id`` is empty for an engine's."""

    number: int
    at_s: float
    kind: Kind
    history_id: str
    details: dict[str, Any]


@dataclass(eq=False)
class EventLog:
    """The newest events, for listeners that ask for those after the last one seen; all are counted.

    A log that succeeds another must start above it, with ``first``. ``told`` hears each event.
    """

    clock: Callable[[], float]
    first: int = 1
    most: int = MOST_EVENTS
    told: Callable[[Event], None] | None = None

    def __post_init__(self) -> None:
        self._next = self.first
        self._kept: deque[Event] = deque()
        # The same by conversation, so that clients may ask often.
        self._of: dict[str, deque[Event]] = {}
        self.counts: Counter[str] = Counter()

    @property
    def newest(self) -> int:
        """Return the number of the last event; without one, that before the first."""
        return self._next - 1

    def add(self, kind: Kind, history_id: str = "", **details: Any) -> None:
        """Add an event. Details that are None are left out."""
        said = {name: value for name, value in details.items() if value is not None}
        event = Event(self._next, self.clock(), kind, history_id, said)
        self._next += 1
        self.counts[kind] += 1
        self._keep(event)

    def take_over(self, events: Iterable[Event]) -> None:
        """Keep a predecessor's events, before any of this log's."""
        for event in events:
            self._keep(event)

    def _keep(self, event: Event) -> None:
        self._kept.append(event)
        self._of.setdefault(identity.conversation_of(event.history_id), deque()).append(event)
        if len(self._kept) > self.most:
            self._forget(self._kept.popleft())
        if self.told is not None:
            self.told(event)

    def _forget(self, oldest: Event) -> None:
        conversation_id = identity.conversation_of(oldest.history_id)
        of_it = self._of[conversation_id]
        of_it.popleft()
        if not of_it:
            del self._of[conversation_id]

    def missed(self, after: int) -> int:
        """Return how many of this log's events after a number are no longer kept."""
        kept_from = self._kept[0].number if self._kept else self._next
        return max(0, kept_from - 1 - max(after, self.first - 1))

    def after(
        self, number: int, kinds: Collection[str] = (), mine: Callable[[str], bool] | None = None
    ) -> list[Event]:
        """Return the kept events after a number, the oldest first.

        No ``kinds`` means all; ``mine`` says whether a history's are wanted.
        """
        # From the newest back, since a listener has seen all but a few.
        new: list[Event] = []
        for one in reversed(self._kept):
            if one.number <= number:
                break
            if (not kinds or one.kind in kinds) and (mine is None or mine(one.history_id)):
                new.append(one)
        return new[::-1]

    def newest_of(self, conversation_id: str, most: int) -> list[Event]:
        return list(islice(reversed(self._of.get(conversation_id, ())), most))[::-1]
