"""The agreement between ConServe's processes: roles, beats, headers, requests to engines.

Routers, engines, the conversation table, LMCache's connector and ``conserve profile`` all speak
this; nothing of it is for clients. It stands here once, so that no two of them can differ.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from conserve import identity
from conserve.history import TurnKey

Role = Literal["prefiller", "decoder"]
"""What an engine is for; where it runs is its tier (`hetero.tiers`)."""

StartPhase = Literal["starting engines", "warming up"]
"""The phases of an engine's start once its code is loaded, in this order."""
START_PHASES: tuple[StartPhase, ...] = get_args(StartPhase)

# --- Beats ----------------------------------------------------------------------------------------

# Engines and routers tell the table that they live, and engines their node's actor.
BEAT_S = 1.0
# Whoever sends no beat for so long is lost. It is long, because a busy machine starves processes; a
# dead engine is usually found at once, by a router whose connection broke.
SILENCE_S = 15.0
# An engine may say nothing of a turn for so long, and then the turn fails with 504: long prompts
# wait for each other, and an answer that is not streamed comes as a whole.
TURN_SILENCE_S = 3600.0

# --- A turn, from a router to a decoder -----------------------------------------------------------

# Has a `DecoderTurn`. A decoder that begins a turn by itself answers with the header as well: then
# it has the turn's `TurnKey` alone.
TURN_HEADER = "x-conserve-turn"
# A decoder refuses a turn that came straight to it by both of these.
REFUSED_HEADER = "x-conserve-refused"
REFUSED_STATUS = 409


class Straight(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tells what a turn goes on with that a router sends straight to a decoder, without the table.

    Attributes:
        end: the digest of all up to its newest answer.
        stated_id: the conversation's id as its client states it, scoped to its tenant.
        tenant: whose it is, where there are keys.
    """

    router_id: str
    end: bytes = b""
    stated_id: str | None = None
    tenant: str | None = None


class DecoderTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tells a decoder of a turn.

    Attributes:
        key: which it is; None: the decoder begins it by itself, by `straight`.
        recognises: whether the next turn is recognised by its messages: the decoder then works out
            the digests.
        root, points: of a history that begins, where it has them.
        looks_up: whether LMCache may have more of the history than this decoder knows of: a
            prefiller has stored its prompt, it comes from another decoder, or others may have
            stored what it begins with.
        parks: whether it is to leave its prompt's KV in host memory.
        prefill_cached_tokens: of a prompt that a prefiller has computed just now, the tokens that
            it had found in caches; what the decoder finds beyond them was computed for this turn.
        notes: whether its stream may have to be continued elsewhere: the decoder then notes beside
            each event which tokens it holds.
        sent_bytes: of a stream that is continued, so many bytes at the body's beginning are notes
            of what its client has, and the request follows them.
        resume_s: in how many seconds after the answer its client expects the next turn; None: it
            does not say.
        last: whether its client says that there will be none.

    Example:
        >>> told = DecoderTurn(TurnKey("c", 1, 257), parks=True)
        >>> DecoderTurn.read(told.header()) == told
        True
    """

    key: TurnKey | None = None
    straight: Straight | None = None
    recognises: bool = False
    root: bytes = b""
    points: bytes = b""
    looks_up: bool = False
    parks: bool = False
    prefill_cached_tokens: int | None = None
    notes: bool = False
    sent_bytes: int = 0
    resume_s: float | None = None
    last: bool = False

    def header(self) -> str:
        """Write it as a header's value."""
        return _header_value(self)

    @classmethod
    def read(cls, value: str) -> "DecoderTurn":
        """Read what `header` has written.

        Raises:
            ValueError: it is not in base64.
            msgspec.DecodeError: it is something else.
        """
        return _DECODER_TURN.decode(base64.b64decode(value))

    @property
    def tenant(self) -> str | None:
        """Return whose turn it is, where there are keys."""
        if self.key is not None:
            return identity.tenant_of(self.key.history_id)
        return None if self.straight is None else self.straight.tenant


_DECODER_TURN = msgspec.msgpack.Decoder(DecoderTurn)
_TURN_KEY = msgspec.msgpack.Decoder(TurnKey)


def key_header(key: TurnKey) -> str:
    """Write a turn's key as a header's value."""
    return _header_value(key)


def read_key(value: str) -> TurnKey:
    """Read what `key_header` has written."""
    return _TURN_KEY.decode(base64.b64decode(value))


def _header_value(told: DecoderTurn | TurnKey) -> str:
    return base64.b64encode(msgspec.msgpack.encode(told)).decode()


# --- A stream's notes, from a decoder to its router and from that to another decoder --------------


class Emitted(NamedTuple):
    """One output of an engine within a stream.

    Attributes:
        finish_reason: set on the last one, as ``stop_reason``: vLLM's words for why it is.
    """

    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


# A comment within its event, which no reader of event streams passes on; see
# https://html.spec.whatwg.org/multipage/server-sent-events.html
NOTE_MARK = b": "
_EMITTED = msgspec.json.Decoder(list[Emitted])


def note(emitted: Sequence[Emitted]) -> bytes:
    """Write what an event holds, as the line that comes before it."""
    return NOTE_MARK + msgspec.json.encode(emitted) + b"\n"


def read_notes(notes: bytes) -> list[Emitted]:
    """Read what a stream's events hold, from its notes one after another.

    Raises:
        msgspec.DecodeError: these are no notes.
    """
    found = []
    for line in notes.splitlines():
        found += _EMITTED.decode(line.removeprefix(NOTE_MARK))
    return found


# --- Responses that decoders keep -----------------------------------------------------------------

# Before the id of a response: a decoder tells what it keeps of it (`StoredResponse`), or forgets
# it.
STORED_PREFIX = "/conserve/responses/"
# Whose response is asked for, where there are keys.
TENANT_HEADER = "x-conserve-tenant"


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and what it answers, as a decoder keeps it.

    Attributes:
        history_id: which conversation it belongs to, as it is kept (`conserve.identity`).
        request: the turn's body, with the whole history as its input.
        response: the response object.
    """

    history_id: str
    request: msgspec.Raw
    response: msgspec.Raw


# --- A request without its answer, from a router to an engine -------------------------------------

# Before the path of a turn: the engine judges the request and does not serve it.
CHECK_PREFIX = "/conserve/check"
# Before the path of a turn: the engine computes the prompt's KV, stores it, and serves no more.
PREFILL_PREFIX = "/conserve/prefill"
# Behind the path of a turn, with or without a prefix: of the output that is asked for, what there
# is room for will do.
ROOM_LEFT = "?room_left"

# --- kv_transfer_params, from whoever asks an engine to LMCache's connector and back --------------

# How much of the conversation LMCache may hold, in tokens: the prompt with which it came to this
# decoder, or that of the last turn that was to leave its KV there.
STORED_TOKENS = "conserve.stored_tokens"
# Whether this request leaves its prompt's KV there.
PARK = "conserve.park"
# Where workers tell that they have stored this request's prompt; see `deployments.engine.stored`.
STORED_TO = "conserve.stored_to"
# In the connector's configuration: LMCache's chunk, which its server is started with.
CHUNK_TOKENS = "conserve.chunk_tokens"
# An engine, or a server that reads another node's memory, waits so long for a transfer of KV, and
# the engine recomputes it then: a prompt takes longer only over links that are slower than that.
TRANSFER_TIMEOUT_S = 10.0
# Set where a prefiller has just computed the prompt, and said that it is stored.
PREFILLED = "conserve.prefilled"
# LMCacheMPConnector answers a request that carries it with an object of the same name.
_STATS = "cached_token_stats"
_OWN = "num_vllm_cached_tokens"
# It counts what lies beyond the engine's own tokens; num_lmcache_cached_tokens counts those too.
_LOADED = "num_lmcache_extra_cached_tokens"
# ConServe's connector adds, of a prompt that was said to be stored: tokens of whole chunks that
# were found nowhere, and whether they were looked up more than once.
MISSED = "conserve.missed_tokens"
LATE = "conserve.late"
# In the connector's statistics, what iterations took: lists of the fields of a
# `conserve.placement.Step`.
STEPS = "conserve.steps"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tells where a prompt's KV was found, in tokens; None where the engine does not say.

    Attributes:
        own_tokens: tokens found in the engine's own prefix cache.
        lmcache_tokens: tokens beyond those, loaded from LMCache.
        missed_tokens: tokens that a prefiller had just stored, and that were not found.
        late: whether what it had stored was looked up more than once.
    """

    own_tokens: int | None
    lmcache_tokens: int | None
    missed_tokens: int = 0
    late: bool = False


def transfer_params(
    stored_tokens: int | None = None, park: bool = False, prefilled: bool = False
) -> dict[str, Any]:
    """``kv_transfer_params`` of a request whose `CachedTokens` are wanted.

    Args:
        stored_tokens: set where the conversation had a turn on this engine before; see
            `STORED_TOKENS`.
        park: see `PARK`.
        prefilled: see `PREFILLED`.
    """
    known: dict[str, Any] = {} if stored_tokens is None else {STORED_TOKENS: stored_tokens}
    if park:
        known[PARK] = True
    if prefilled:
        known[PREFILLED] = True
    return {_STATS: True, **known}


def cached_tokens(params: Mapping[str, Any] | None) -> CachedTokens:
    """Read where KV was found from the ``kv_transfer_params`` of an engine's answer."""
    stats = (params or {}).get(_STATS) or {}
    own, loaded = stats.get(_OWN), stats.get(_LOADED)
    return CachedTokens(
        None if own is None else int(own),
        None if loaded is None else int(loaded),
        int(stats.get(MISSED, 0)),
        bool(stats.get(LATE)),
    )


# --- What an engine's own scheduler is told of a turn, and tells of its history -------------------

# Set by the decoder, over anything that a client gives: kv_transfer_params are ours.
TURN = "conserve.turn"
# With a turn's last token: what of its history stays with the engine.
KEPT = "conserve.kept"
# And how long it waited in the engine before it ran, and what for.
WAITED = "conserve.waited"


def history_key(history_id: str, incarnation: int) -> str:
    """A history by one word, which another one of the same id later on does not have."""
    return f"{incarnation} {history_id}"


def scheduled_turn(key: str, resume_s: float | None, last: bool) -> dict[str, Any]:
    """``kv_transfer_params`` that tell an engine's scheduler whose turn a request is.

    Args:
        key: `history_key`.
        resume_s: in how many seconds the client expects the next turn; None: it does not say.
        last: whether it says that there will be none.
    """
    return {TURN: {"key": key, "resume_s": resume_s, "last": last}}


def waited(for_s: float, what: str | None) -> dict[str, Any]:
    """``kv_transfer_params`` of an answer that say what it waited for in the engine."""
    return {WAITED: {"s": for_s, "for": what}}


def engine_wait(params: Mapping[str, Any] | None) -> tuple[float | None, str | None]:
    """How long an answer has waited in the engine, in seconds, and what for; None where the
    engine does not say."""
    said = (params or {}).get(WAITED) or {}
    return said.get("s"), said.get("for")


def kept(tokens: int, for_s: float) -> dict[str, Any]:
    """``kv_transfer_params`` of an answer that say what of its history stays in the engine's cache,
    and for how long it is kept there."""
    return {KEPT: {"tokens": tokens, "for_s": for_s}}


def engine_kept(params: Mapping[str, Any] | None) -> tuple[int | None, float | None]:
    """Read what `kept` has said, in tokens and seconds; None where the engine does not say."""
    said = (params or {}).get(KEPT) or {}
    return said.get("tokens"), said.get("for_s")
