"""One turn: its name, and the record that its engines, its router and the table add to."""

import struct
from typing import Literal, NamedTuple

import msgspec

Outcome = Literal["completed", "cancelled", "refused", "failed"]
"""How a turn ended: ``cancelled`` by its client, ``refused`` with a 4xx, or ``failed``."""

Reason = Literal["home", "new", "branch", "resumed", "moved"]
"""Why a turn runs where it does: its history is bound there (``home``); a new history where the
placement policy put it, or where others hold its beginning (``branch``); a history that was paused
(``resumed``), or whose decoder was lost (``moved``)."""

Unbound = Literal["paused", "moved", "lost", "left", "unknown"]
"""A history was bound nowhere: paused, moved off an engine that has it, bound to one that is gone,
or not known although its turn follows answers (the table was lost, or it had ended)."""

Place = Literal["tools", "system", "first_prompt", "messages"]


class TurnKey(NamedTuple):
    """The name of one turn.

    Attributes:
        incarnation: tells its history from an earlier one of the same id.
        turn_id: numbers the turns of a table, over all conversations.
    """

    history_id: str
    incarnation: int
    turn_id: int


class Broken(msgspec.Struct, frozen=True):
    """A turn that follows earlier answers begins a history: its prefix is that of no other.

    Attributes:
        place: where it differs: in its ``tools``, its ``system`` messages alone, elsewhere before
            the first answer (``first_prompt``), or behind that (``messages``).
        messages: how many it has in common with the history that is most like it, up to an answer;
            0: only the first prompt.
        exact: whether no further answer is in common. A long history forgets some answers.
    """

    place: Place
    messages: int = 0
    exact: bool = True


class TurnStats(msgspec.Struct, omit_defaults=True, gc=False):
    """All that is known of one turn, filled in by whoever observes it.

    The router sends what it has with the request; the decoder goes on with that record, and gives
    it to the router and to the table as the answer ends; the router adds how the client was served,
    and the table has noted how the turn began. Metrics, log lines, spans, events, views and
    `conserve.why` read this record and nothing else. A field that is not set is not known, or 0.

    Attributes:
        output_tokens: of the longest choice, if there are several.
        decoder_cached_tokens: prompt tokens found in the decoder's own prefix cache.
        lmcache_tokens: prompt tokens that the decoder took from LMCache.
        tool: what the answer calls (`conserve.pausing.tool_called`); None if it was not read.
        decode_s: from the first token to the last, by the engine's clock; None if unknown.
        missed_tokens: just stored by a prefiller, but not found by the decoder.
        late: whether it looked them up more than once.
        reused_tokens: what no engine computed for this turn, as its client is told.
        engine_queued_s, engine_prefill_s: in the decoder before it ran, the load of its KV
            included, and from then to the first token; None if the engine keeps no times.
        engine_wait_s: wait in the decoder's engine; None under ``engine_scheduler: vllm``.
        engine_wait_for: see `conserve.wire.WaitFor`.
        kept_tokens, kept_s: what of its history the engine has now, and for how long it is pinned.
        encoded_images: images that were encoded for it, on any engine.
        encoded_tokens: embeddings of those that its decoder encoded.
        node_images: images that engines took from their node's memory instead.
        encode_wait_s, encode_s, prefill_s: see `conserve.wire.StageTimes`.

        prefilled_tokens: the prompt's, on its prefiller; 0 without one, or if that failed.
        prefiller_lmcache_tokens: of those, found in LMCache.
        prefiller_cached_tokens: found there or in the prefiller's own cache; None if it does not
            say, or there were several prompts.
        prefiller_s: in its engine, from when it ran to its end; None if the engine keeps no times.
        prefill_failed: whether a remote prefill failed, so that the decoder computed the prompt.

        latency_s: time from the request's arrival to the answer's last byte.
        ttft_s: time to the first byte of a streamed answer; None if it was not streamed.
        tbt_s: gaps between a stream's parts.
        effective_ago_s: how long ago the first token of a chat's answer came that is not a tool
            call; of an answer in one piece, the answer. Not a time, since nodes' clocks differ.
        continued: how often its stream went on at another decoder.
        in_time: whether it kept the times that its client gave; None if it gave none.
        tenant: None where there are no keys.
        client: the product in its client's ``User-Agent``; None: it names none.
        error: the code of the error that the client got; never its message, which may quote the
            prompt.
        decoder_id, prefiller_id: the engines that served it last.
        phases: seconds, by the names of `deployments.router.phases`.

        began_s: when the table bound or began it; Unix time.
        idle_s: how long its history was idle before; None: it was new, or another turn ran.
        had_tokens: of the history, after its turn before.
        unbound: why its history was bound nowhere; None: it was bound, or new.
        ahead_s: how long before it its history's KV was brought back; None: it was not.
        room_s, room_why: how long it waited for room, and why; see `conserve.admission.Why`.
        beginning_s: how long it waited for another prompt's prefill that has its beginning.
        rejoined: whether its client has sent it again, since its router was lost.
        remote_prefill_s: from its beginning to the end of its remote prefill; None: it has none.
        prefill_j: estimated energy of its prefills (`hetero.energy`); 0: not known.
        why: the reasons for its wait, if it was slow and any are known.
    """

    # The decoder's.
    prompt_tokens: int = 0
    output_tokens: int = 0
    decoder_cached_tokens: int = 0
    lmcache_tokens: int = 0
    tool: str | None = None
    decode_s: float | None = None
    missed_tokens: int = 0
    late: bool = False
    reused_tokens: int | None = None
    engine_queued_s: float | None = None
    engine_prefill_s: float | None = None
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
    # The prefiller's.
    prefilled_tokens: int = 0
    prefiller_lmcache_tokens: int = 0
    prefiller_cached_tokens: int | None = None
    prefiller_s: float | None = None
    prefill_failed: bool = False
    # The router's.
    outcome: Outcome | None = None
    latency_s: float = 0.0
    ttft_s: float | None = None
    tbt_s: tuple[float, ...] = ()
    effective_ago_s: float | None = None
    continued: int = 0
    in_time: bool | None = None
    tenant: str | None = None
    client: str | None = None
    request_id: str | None = None
    error: str | None = None
    decoder_id: str | None = None
    prefiller_id: str | None = None
    placement: Reason | None = None
    phases: dict[str, float] | None = None
    # The table's.
    began_s: float = 0.0
    idle_s: float | None = None
    had_tokens: int = 0
    unbound: Unbound | None = None
    broken: Broken | None = None
    ahead_s: float | None = None
    room_s: float = 0.0
    room_why: str = "room"
    beginning_s: float = 0.0
    remote_prefill_s: float | None = None
    prefill_j: float = 0.0
    rejoined: bool = False
    why: str | None = None

    @property
    def found_tokens(self) -> int:
        """Return the prompt tokens that its decoder found, and did not compute."""
        return self.decoder_cached_tokens + self.lmcache_tokens

    @property
    def remote_tokens(self) -> int:
        """Return the prompt tokens that its prefiller computed."""
        found = self.prefiller_cached_tokens
        found = self.prefiller_lmcache_tokens if found is None else found
        return max(0, self.prefilled_tokens - found)

    @property
    def computed_tokens(self) -> int:
        """Return the tokens that engines computed for it, its answer's included."""
        in_decoder = max(0, self.prompt_tokens - self.found_tokens)
        return in_decoder + self.remote_tokens + self.output_tokens

    @property
    def stages_s(self) -> dict[str, float]:
        """Return how long it was in each stage on its decoder, of those that it went through."""
        times_s = {"encode": self.encode_s, "prefill": self.prefill_s, "decode": self.decode_s}
        found_s = {stage: took_s for stage, took_s in times_s.items() if took_s}
        if self.encode_wait_s or self.encode_s:
            return {"encode_wait": self.encode_wait_s, **found_s}
        return found_s

    def merge(self, other: "TurnStats") -> None:
        """Take over all fields that ``other`` has set."""
        for name, nothing in _NOTHING.items():
            said = getattr(other, name)
            if said != nothing:
                setattr(self, name, said)

    def add_encoded(self, other: "TurnStats") -> None:
        """Count images that ``other``, an engine's record, was encoded or taken from memory for."""
        self.encoded_images += other.encoded_images
        self.encoded_tokens += other.encoded_tokens
        self.node_images += other.node_images

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

    @classmethod
    def unpack(cls, packed: bytes) -> "TurnStats":
        """Read what `pack` has written, at the beginning of ``packed``."""
        prompt, output, cached, loaded, encoded, from_node, *times_s = _PACKED.unpack_from(packed)
        return cls(
            prompt, output, cached, loaded, decode_s=times_s[3] or None, encoded_images=encoded,
            node_images=from_node, encode_wait_s=times_s[0], encode_s=times_s[1],
            prefill_s=times_s[2],
        )  # fmt: skip


_NOTHING = {name: getattr(TurnStats(), name) for name in TurnStats.__struct_fields__}

_PACKED = struct.Struct("<4I2H4e")
# The tokens of prompt and answer, with which it begins.
TOKENS = struct.Struct("<2I")
PACKED_BYTES = _PACKED.size
_MOST_IMAGES = 2**16 - 1
# The largest half-precision number.
_MOST_S = 65504.0
