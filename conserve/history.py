"""One history, as the table and its decoder keep it.

The struct has ``gc=False``: the garbage collector would visit a million of them, and nothing in
them leads back to them.
"""

from enum import Enum, auto

import msgspec

from conserve.hints import Hints
from conserve.histories.prefixes import Prefix, mark, newest_mark, with_point
from conserve.recognition import Digest
from conserve.turn import PACKED_BYTES, TOKENS, TurnKey, TurnStats

_NO_TURN = bytes(PACKED_BYTES)


class State(Enum):
    """The state of a history in a conversation table."""

    NEW = auto()
    """Nothing of it was bound yet."""
    BOUND = auto()
    """It is at its home, and none of its turns runs."""
    RUNNING = auto()
    """A turn of it runs at its home, or is on its way there."""
    PAUSED = auto()
    """It gave up its room, and is bound nowhere."""
    UNBOUND = auto()
    """It is bound nowhere since its home is gone, is leaving, or never had it."""
    ENDED = auto()

    # An enum's own, in Python, takes a tenth of a table's time.
    __hash__ = object.__hash__


FOLLOWING = {
    State.NEW: {State.BOUND, State.UNBOUND, State.ENDED},
    State.BOUND: {State.RUNNING, State.PAUSED, State.UNBOUND, State.ENDED},
    State.RUNNING: {State.BOUND, State.UNBOUND, State.ENDED},
    State.PAUSED: {State.BOUND, State.ENDED},
    State.UNBOUND: {State.BOUND, State.ENDED},
    State.ENDED: set(),
}


class History(msgspec.Struct, gc=False):
    """A live history. Times are seconds of the clock whose readings are passed in.

    Attributes:
        incarnation: tells it from an earlier history of the same id.
        home: the engine that has it; None while it is bound nowhere.
        held_tokens: its KV there; until its first turn's end, the promised prompt length.
        moves: how often it was bound again because its home was lost.
        prefiller_id, prefill_tokens: the remote prefill under way, if any.
        packed: `last_turn` and `points` in one small object.
        further_tails: of an answer with several choices, `tails` but for the first.
        finished: id of the latest turn known to have ended.
        promised: whether no turn at its home has computed what it holds yet.
        asked_s: when its first request came; None if the table was lost since.
        period: the table's period in which to look next whether it is idle.
        energy_j: estimated share of what its engines' GPUs have used; 0 if none report.
        root: the digest of its first prompt; None for completions.
        adapter: its adapter's id; empty: it has none, or the table was lost since.
        base: in a table, what it begins with as others at its home do.
        state: in a table; see `State`.
    """

    id: str
    incarnation: int
    created_s: float
    last_used_s: float
    home: str | None = None
    held_tokens: int = 0
    turns: int = 0
    running: tuple[int, ...] = ()
    moves: int = 0
    prefiller_id: str | None = None
    prefill_tokens: int = 0
    packed: bytes = _NO_TURN
    further_tails: tuple[bytes, ...] = ()
    finished: int = 0
    promised: bool = False
    asked_s: float | None = None
    ttfet_s: float | None = None
    period: int = 0
    energy_j: float = 0.0
    root: Digest | None = None
    adapter: str = ""
    base: Prefix | None = None
    hints: Hints | None = None
    tool: str | None = None
    state: State = State.NEW

    @property
    def last_turn(self) -> TurnStats | None:
        """Return the engine's report of its latest turn; None before one has left anything."""
        return TurnStats.unpack(self.packed) if self.has_last_turn else None

    @last_turn.setter
    def last_turn(self, stats: TurnStats) -> None:
        self.packed = stats.pack() + self.packed[PACKED_BYTES:]

    @property
    def background(self) -> bool:
        return self.hints is not None and self.hints.background

    @property
    def due_s(self) -> float | None:
        """Return when its client expects to send the next turn; None if it has not said so."""
        expected_s = None if self.hints is None else self.hints.expected_resume_s
        return None if expected_s is None else self.last_used_s + expected_s

    @property
    def has_last_turn(self) -> bool:
        return not self.packed.startswith(_NO_TURN)

    @property
    def last_tokens(self) -> int:
        """Return its length after its latest turn; 0 before one has left anything."""
        return sum(TOKENS.unpack_from(self.packed))

    @property
    def shared_tokens(self) -> int:
        """Return how much of it others on its decoder begin with, too."""
        return 0 if self.base is None else self.base.tokens

    @property
    def points(self) -> bytes:
        """Return `Points.packed`: beginnings of known length, at which others may leave it."""
        return self.packed[PACKED_BYTES:]

    @points.setter
    def points(self, packed: bytes) -> None:
        self.packed = self.packed[:PACKED_BYTES] + packed

    @property
    def tails(self) -> tuple[bytes, ...]:
        """Return the marks by which its next turn is recognised: the newest point's first."""
        newest = newest_mark(self.packed, PACKED_BYTES)
        return (newest, *self.further_tails) if newest else ()

    def set_tails(self, tails: tuple[Digest, ...], stats: TurnStats) -> None:
        """Set the stats of its latest turn, and the tails of its answer's choices."""
        # One assignment, since each copies the packed bytes.
        packed = stats.pack() + self.packed[PACKED_BYTES:]
        tokens = stats.prompt_tokens + stats.output_tokens
        self.packed = with_point(packed, tails[0], tokens, PACKED_BYTES)
        self.further_tails = tuple(map(mark, tails[1:])) if len(tails) > 1 else ()

    @property
    def newest_turn(self) -> TurnKey:
        """The turn that began last, of those under way; IndexError without any."""
        return TurnKey(self.id, self.incarnation, self.running[-1])
