"""One conversation, as the table and the decoder that holds it keep it, and its turns.

What a table keeps a million of goes without the cyclic garbage collector, which would visit each of
them (``gc=False``): nothing in them can lead back to them.
"""

import struct
from typing import NamedTuple

import msgspec

from conserve import identity
from conserve.hints import Hints
from conserve.histories.points import mark, newest_mark, with_point
from conserve.histories.sharing import Prefix
from conserve.recognition import Digest


class TurnKey(NamedTuple):
    """Names one turn: of a conversation, and of that one among all conversations that had its id.

    Attributes:
        incarnation: tells the conversation from an earlier one of the same id.
        turn_id: numbers the turns of a table, over all conversations.
    """

    history_id: str
    incarnation: int
    turn_id: int


class TurnStats(msgspec.Struct, frozen=True, gc=False):
    """Tells what an engine reports of one turn, in tokens.

    Attributes:
        prompt_tokens: the turn's whole prompt, history included.
        output_tokens: tokens generated (by the longest choice, where there are several).
        decoder_cached_tokens: prompt tokens found in the decoder's own prefix cache.
        lmcache_tokens: prompt tokens taken from LMCache.
        tool: what the answer calls (`conserve.pausing.tool_called`); None: it was not read.
        decode_s: from the first token to the last, by the engine's clock; None: it does not say.
        missed_tokens: prompt tokens that a prefiller had just stored in LMCache, and that the
            decoder did not find there.
        late: whether it looked them up more than once.
        engine_wait_s: how long it waited in the decoder's engine before it ran; None: that does not
            say (``engine_scheduler: vllm``).
        engine_wait_for: what for (`conserve.engine_scheduling.WaitFor`); None: it was not seen to.
        kept_tokens, kept_s: what of its history is in the engine's cache now, and for how long it
            is kept there whoever else comes (0: as anything cached); None: it does not say.
    """

    prompt_tokens: int
    output_tokens: int
    decoder_cached_tokens: int
    lmcache_tokens: int
    tool: str | None = None
    decode_s: float | None = None
    missed_tokens: int = 0
    late: bool = False
    engine_wait_s: float | None = None
    engine_wait_for: str | None = None
    kept_tokens: int | None = None
    kept_s: float | None = None

    @property
    def found_tokens(self) -> int:
        """Prompt tokens that were found, and not computed."""
        return self.decoder_cached_tokens + self.lmcache_tokens

    def misses(self, parked_tokens: int) -> bool:
        """Whether what host memory should have of the prompt is not there any more.

        Of a part that was dropped the rest is found, so at less than half of it all is taken for
        gone: its server may have been started anew.

        Args:
            parked_tokens: what it should have, from the history's beginning on; 0: nothing.
        """
        return 2 * self.found_tokens < min(self.prompt_tokens, parked_tokens)

    def pack(self) -> bytes:
        """The numbers in one small object, not five, for a table of a million conversations."""
        return _PACKED.pack(
            self.prompt_tokens, self.output_tokens, self.decoder_cached_tokens, self.lmcache_tokens
        )


_PACKED = struct.Struct("<4I")
_NO_TURN = bytes(_PACKED.size)


class History(msgspec.Struct, gc=False):
    """A live conversation. Times are seconds of the clock whose readings are passed in.

    Attributes:
        incarnation: tells it from an earlier conversation of the same id.
        decoder_id: where it is bound; None before its first turn and after a decoder was lost.
        held_tokens: its KV on that decoder; from binding to the first turn's end, the promised
            prompt length.
        turns: number of completed turns.
        running: ids of the turns under way.
        moves: how often it was bound again because its decoder was lost.
        prefiller_id, prefill_tokens: the remote prefill under way, if any.
        packed: `last_turn` and `points`, as they are kept: one small object, not several.
        further_tails: of an answer with several choices, `tails` but for the first.
        finished: id of the latest turn known to have ended.
        promised: whether what it holds is a promise: no turn on this decoder has computed it yet.
        asked_s: when its first request came; None where that is not known, because the table was
            lost since.
        ttfet_s: time from then to the first token of its first answer that was not a tool call.
        period: the period of the table in which to look next whether it is idle.
        energy_j: its share of what its engines' GPUs have used, estimated; 0 where none report.
        root: the digest of its first prompt; None where that was no chat's.
        base: in a table, what it begins with as others on its decoder do.
        hints: the newest that its client gave; None without any.
        tool: what its last answer called; see `TurnStats`.
    """

    id: str
    incarnation: int
    created_s: float
    last_used_s: float
    decoder_id: str | None = None
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
    base: Prefix | None = None
    hints: Hints | None = None
    tool: str | None = None

    @property
    def last_turn(self) -> TurnStats | None:
        """Return what the engine reported of its latest turn; None before one has left anything."""
        return TurnStats(*_PACKED.unpack_from(self.packed)) if self.has_last_turn else None

    @last_turn.setter
    def last_turn(self, stats: TurnStats) -> None:
        self.packed = stats.pack() + self.packed[_PACKED.size :]

    @property
    def has_last_turn(self) -> bool:
        """Whether a turn has left anything."""
        return not self.packed.startswith(_NO_TURN)

    @property
    def last_tokens(self) -> int:
        """How long it was after its latest turn; 0 before one has left anything."""
        last = self.last_turn
        return 0 if last is None else last.prompt_tokens + last.output_tokens

    @property
    def has_points(self) -> bool:
        """Whether any point is known."""
        return len(self.packed) > _PACKED.size

    @property
    def points(self) -> bytes:
        """`Points.packed`: beginnings whose length is known, at which others may leave it."""
        return self.packed[_PACKED.size :]

    @points.setter
    def points(self, packed: bytes) -> None:
        self.packed = self.packed[: _PACKED.size] + packed

    @property
    def tails(self) -> tuple[bytes, ...]:
        """The marks by which its next turn is recognised: the newest point's, and others'."""
        newest = newest_mark(self.packed, _PACKED.size)
        return (newest, *self.further_tails) if newest else ()

    def set_tails(self, tails: tuple[Digest, ...], stats: TurnStats) -> None:
        """Note a turn that is its latest, and by what the next one is recognised.

        Args:
            tails: of the answer's choices, of which there is at least one. The engine does not
                tell their lengths apart; the first one's is a point.
            stats: what the engine reported of the turn.
        """
        # At once: each assignment makes the packed bytes anew.
        packed = stats.pack() + self.packed[_PACKED.size :]
        tokens = stats.prompt_tokens + stats.output_tokens
        self.packed = with_point(packed, tails[0], tokens, _PACKED.size)
        self.further_tails = tuple(map(mark, tails[1:])) if len(tails) > 1 else ()

    @property
    def newest_turn(self) -> TurnKey:
        """The turn that began last, of those under way.

        Raises:
            IndexError: no turn is under way.
        """
        return TurnKey(self.id, self.incarnation, self.running[-1])

    @property
    def can_go_on(self) -> bool:
        """Whether its client can come back to it: by an answer that it has, or by its name."""
        return bool(self.running or self.turns) or not identity.is_generated(self.id)
