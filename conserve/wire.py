"""What ConServe's processes agree on: roles, beats, headers, and what engines are asked and tell.

Routers, engines, the conversation table, LMCache's connector and ``conserve profile`` all speak
this; nothing of it is for clients. It stands here once, so that no two of them can differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec

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

# --- Headers of a turn, from a router to a decoder ------------------------------------------------

CONVERSATION_HEADER = "x-conserve-conversation"
INCARNATION_HEADER = "x-conserve-incarnation"
TURN_HEADER = "x-conserve-turn"
# Set where the next turn is recognised by its messages: the decoder then works out the digests.
RECOGNISE_HEADER = "x-conserve-recognise"
# Of a history that begins, where it has them: its root and its points, in hexadecimal digits.
ROOT_HEADER = "x-conserve-root"
POINTS_HEADER = "x-conserve-points"
# Set where LMCache may have more of the history than this decoder knows of: a prefiller has stored
# its prompt, it comes from another decoder, or others may have stored what it begins with.
LOOK_UP_HEADER = "x-conserve-look-up"
# Set where the turn is to leave its prompt's KV in host memory.
PARK_HEADER = "x-conserve-park"
# Set where a prefiller has computed the prompt just now: so many of its tokens it had found in
# caches. What the decoder then finds beyond them has been computed for this turn.
PREFILL_CACHED_HEADER = "x-conserve-prefill-cached"
# Set where a stream may have to be continued elsewhere: the decoder then notes beside each event
# which tokens it holds.
NOTES_HEADER = "x-conserve-notes"
# Set where a stream is continued: so many bytes at the body's beginning are notes of what its
# client has, and the request follows them.
SENT_HEADER = "x-conserve-sent"

# --- Headers of a turn that a router sends straight to a decoder ----------------------------------

# Set where the table was not asked: the router's id. The decoder answers with the turn's own
# headers (conversation, incarnation, turn), or refuses with this one and `REFUSED_STATUS`.
DIRECT_HEADER = "x-conserve-direct"
REFUSED_STATUS = 409
# What it goes on with: digest of all up to its newest answer, in hexadecimal digits (`ROOT_HEADER`
# goes with it), and the conversation's id as its client states it, scoped to its tenant.
END_HEADER = "x-conserve-end"
STATED_HEADER = "x-conserve-stated"

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
    """What an event holds, as the line that comes before it."""
    return NOTE_MARK + msgspec.json.encode(emitted) + b"\n"


def read_notes(notes: bytes) -> list[Emitted]:
    """What a stream's events hold, by its notes one after another.

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
    """Where a prompt's KV was found, in tokens; None where the engine does not say.

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
    """What the ``kv_transfer_params`` of an engine's answer say."""
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
# Set where the client said so: in how many seconds after the answer it expects the next turn, and
# that there will be none.
RESUME_HEADER = "x-conserve-resume-s"
LAST_HEADER = "x-conserve-last"


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
    """What `kept` has said, in tokens and seconds; None where the engine does not say."""
    said = (params or {}).get(KEPT) or {}
    return said.get("tokens"), said.get("for_s")
