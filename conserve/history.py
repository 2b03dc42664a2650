"""One history, as the table and its decoder keep it, and its turns.

The structs have ``gc=False``: the garbage collector would visit a million of them, and nothing in
them leads back to them.
"""

import struct
from typing import NamedTuple

import msgspec

from conserve.hints import Hints
from conserve.histories.points import mark, newest_mark, with_point
from conserve.histories.sharing import Prefix
from conserve.recognition import Digest


class TurnKey(NamedTuple):
    """The name of one turn.

    Attributes:
        incarnation: tells its history from an earlier one of the same id.
        turn_id: numbers the turns of a table, over all conversations.
    """

    history_id: str
    incarnation: int
    turn_id: int


class TurnStats(msgspec.Struct, frozen=True, gc=False):
    """An engine's report of one turn.

    Attributes:
        output_tokens: of the longest choice, if there are several.
        decoder_cached_tokens: prompt tokens found in the decoder's own prefix cache.
        lmcache_tokens: prompt tokens taken from LMCache.
        tool: what the answer calls (`conserve.pausing.tool_called`); None if it was not read.
        decode_s: from the first token to the last, by the engine's clock; None if unknown.
        missed_tokens: just stored by a prefiller, but not found by the decoder.
        late: whether it looked them up more than once.
        engine_wait_s: wait in the decoder's engine; None under ``engine_scheduler: vllm``.
        engine_wait_for: see `conserve.wire.WaitFor`.
        kept_tokens, kept_s: what of its history the engine has now, and for how long it is pinned.
        encoded_images: images that were encoded for it, on any engine.
        encoded_tokens: embeddings of those that its decoder encoded.
        node_images: images that engines took from their node's memory instead.
        encode_wait_s, encode_s, prefill_s: see `conserve.wire.StageTimes`.
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
    encoded_images: int = 0
    encoded_tokens: int = 0
    node_images: int = 0
    encode_wait_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def found_tokens(self) -> int:
        """Return the prompt tokens that were found, and not computed."""
        return self.decoder_cached_tokens + self.lmcache_tokens

    def parked_after(self, tokens: int, parks: bool) -> int | None:
        """Return how much of the history host memory has after this turn; None if unknown.

        If less than half of ``tokens`` is found, all counts as evicted: the server may have
        restarted. A turn that was cut before any output may be neither computed nor looked up.

        Args:
            tokens: what host memory should have had.
            parks: whether the turn left its prompt's KV there.
        """
        evicted = 2 * self.found_tokens < min(self.prompt_tokens, tokens)
        if not self.output_tokens or not (evicted or parks or self.lmcache_tokens):
            return None
        kept_tokens = 0 if evicted else tokens
        return max(kept_tokens, self.prompt_tokens) if parks else kept_tokens

    def pack(self) -> bytes:
        """Pack counts, and times to three digits, since a table has a million histories."""
        times_s = (self.encode_wait_s, self.encode_s, self.prefill_s, self.decode_s or 0.0)
        return _PACKED.pack(
            self.prompt_tokens, self.output_tokens, self.decoder_cached_tokens, self.lmcache_tokens,
            min(self.encoded_images, _MOST_IMAGES), min(self.node_images, _MOST_IMAGES),
            *(min(one, _MOST_S) for one in times_s),
        )  # fmt: skip


_PACKED = struct.Struct("<4I2H4e")
_MOST_IMAGES = 2**16 - 1
# The largest half-precision number.
_MOST_S = 65504.0
_NO_TURN = bytes(_PACKED.size)


class History(msgspec.Struct, gc=False):
    """A live history. Times are seconds of the clock whose readings are passed in.

    Attributes:
        incarnation: tells it from an earlier history of the same id.
        decoder_id: None while it is bound nowhere.
        held_tokens: its KV on that decoder; until its first turn's end, the promised prompt length.
        moves: how often it was bound again because its decoder was lost.
        prefiller_id, prefill_tokens: the remote prefill under way, if any.
        packed: `last_turn` and `points` in one small object.
        further_tails: of an answer with several choices, `tails` but for the first.
        finished: id of the latest turn known to have ended.
        promised: whether no turn on this decoder has computed what it holds yet.
        asked_s: when its first request came; None if the table was lost since.
        period: the table's period in which to look next whether it is idle.
        energy_j: estimated share of what its engines' GPUs have used; 0 if none report.
        root: the digest of its first prompt; None for completions.
        base: in a table, what it begins with as others on its decoder do.
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
        """Return the engine's report of its latest turn; None before one has left anything."""
        if not self.has_last_turn:
            return None
        prompt, output, cached, loaded, encoded, from_node, *times_s = _PACKED.unpack_from(
            self.packed
        )
        return TurnStats(
            prompt, output, cached, loaded, decode_s=times_s[3] or None, encoded_images=encoded,
            node_images=from_node, encode_wait_s=times_s[0], encode_s=times_s[1],
            prefill_s=times_s[2],
        )  # fmt: skip

    @last_turn.setter
    def last_turn(self, stats: TurnStats) -> None:
        self.packed = stats.pack() + self.packed[_PACKED.size :]

    @property
    def has_last_turn(self) -> bool:
        return not self.packed.startswith(_NO_TURN)

    @property
    def last_tokens(self) -> int:
        """Return its length after its latest turn; 0 before one has left anything."""
        last = self.last_turn
        return 0 if last is None else last.prompt_tokens + last.output_tokens

    @property
    def shared_tokens(self) -> int:
        """Return how much of it others on its decoder begin with, too."""
        return 0 if self.base is None else self.base.tokens

    @property
    def points(self) -> bytes:
        """Return `Points.packed`: beginnings of known length, at which others may leave it."""
        return self.packed[_PACKED.size :]

    @points.setter
    def points(self, packed: bytes) -> None:
        self.packed = self.packed[: _PACKED.size] + packed

    @property
    def tails(self) -> tuple[bytes, ...]:
        """Return the marks by which its next turn is recognised: the newest point's first."""
        newest = newest_mark(self.packed, _PACKED.size)
        return (newest, *self.further_tails) if newest else ()

    def set_tails(self, tails: tuple[Digest, ...], stats: TurnStats) -> None:
        """Set the stats of its latest turn, and the tails of its answer's choices."""
        # One assignment, since each copies the packed bytes.
        packed = stats.pack() + self.packed[_PACKED.size :]
        tokens = stats.prompt_tokens + stats.output_tokens
        self.packed = with_point(packed, tails[0], tokens, _PACKED.size)
        self.further_tails = tuple(map(mark, tails[1:])) if len(tails) > 1 else ()

    @property
    def newest_turn(self) -> TurnKey:
        """The turn that began last, of those under way; IndexError without any."""
        return TurnKey(self.id, self.incarnation, self.running[-1])
