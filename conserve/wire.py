"""The interface between ConServe's processes: roles, beats, headers, requests to engines.

Routers, engines, the conversation table, LMCache's connector and ``conserve profile`` use it;
clients do not.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from conserve.recognition import Beginning
from conserve.turn import TurnKey, TurnStats

Role = Literal["encoder", "prefiller", "decoder"]
"""The work of an engine; the place where it runs is its tier (`hetero.tiers`)."""

StartPhase = Literal["starting engines", "warming up"]
"""The phases of an engine's start once its code is loaded, in this order."""
START_PHASES: tuple[StartPhase, ...] = get_args(StartPhase)

# --- Beats ----------------------------------------------------------------------------------------

# Engines and routers tell the table that they live, and engines their node's actor.
BEAT_S = 1.0
# A process that sends no beat for this long is lost. It is long, because a busy machine starves
# processes; routers find a dead engine at once, when their connections break.
SILENCE_S = 15.0
# A turn fails with 504 if its engine sends nothing for this long. It is long, because prompts wait
# for each other, and an answer that is not streamed comes as a whole.
TURN_SILENCE_S = 3600.0

# --- A turn, from a router to a decoder -----------------------------------------------------------

# Has a `DecoderTurn`. A decoder that begins a turn by itself answers with this header, too, but
# only with the turn's `TurnKey`.
TURN_HEADER = "x-conserve-turn"
# A decoder refuses a turn that came straight to it with both of these.
REFUSED_HEADER = "x-conserve-refused"
REFUSED_STATUS = 409


# Takes a `Reader`, as JSON, that reads an answer no more: its client has left, say.
LEAVE_PATH = "/conserve/leave"
# An answer whose router is lost is made and kept for this long, for its client to ask for again.
ALONE_S = 120.0


class Reader(NamedTuple):
    """One router's exchange with a decoder, by the router's own number."""

    router_id: str
    number: int


class Straight(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn that a router sends straight to a decoder, without the table."""

    end: bytes = b""
    stated_id: str | None = None
    tenant: str | None = None


class Encoded(NamedTuple):
    """An engine's work for the images of one request.

    Attributes:
        images, tokens: those that its encoder computed, and their embeddings.
        node_images: those that it took from its node's memory.
    """

    images: int = 0
    tokens: int = 0
    node_images: int = 0

    def plus(self, other: "Encoded") -> "Encoded":
        return Encoded(*map(sum, zip(self, other, strict=True)))


NOTHING_ENCODED = Encoded()


class Lack(NamedTuple):
    """GPUs of engines that are wanted, and for which there is no room.

    ``owed_gpus`` are of those that a model has in any case.
    """

    gpus: float = 0.0
    owed_gpus: float = 0.0


NO_LACK = Lack()


class DecoderTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn, for its decoder.

    Attributes:
        key: None if the decoder begins it by itself, by `straight`.
        beginning: of a chat, from which the decoder computes what recognises the next turn.
        root, points: of a history that begins, if it has them.
        looks_up: whether LMCache may have more of the history than this decoder knows.
        parks: whether it leaves its prompt's KV in host memory.
        stats: its record so far: what a prefiller, and encoders, have done.
        notes: whether each event is sent with its tokens, since the stream may have to continue
            elsewhere.
        sent_bytes: of a stream that is continued, the length of the notes before the request.
        resume_s: in how many seconds after the answer its client expects the next turn, if it says
            so.
        last: whether its client says that there will be none.
        background: whether it waits for others, where the engine orders calls.
        reader: who reads the answer.
        digest: of the request: only a client that sends the same again may rejoin its answer.
        rejoins: whether it is for an answer that is under way here, alone, and for no other.
    """

    key: TurnKey | None = None
    straight: Straight | None = None
    beginning: Beginning | None = None
    root: bytes = b""
    points: bytes = b""
    looks_up: bool = False
    parks: bool = False
    stats: TurnStats | None = None
    notes: bool = False
    sent_bytes: int = 0
    resume_s: float | None = None
    last: bool = False
    background: bool = False
    reader: Reader = Reader("", 0)
    digest: bytes = b""
    rejoins: bool = False

    def header(self) -> str:
        return header_value(self)

    @classmethod
    def read(cls, value: str) -> "DecoderTurn":
        """Read what `header` has written; ValueError if it is something else."""
        return _DECODER_TURN.decode(base64.b64decode(value))


_DECODER_TURN = msgspec.msgpack.Decoder(DecoderTurn)
_TURN_KEY = msgspec.msgpack.Decoder(TurnKey)


def read_key(value: str) -> TurnKey:
    return _TURN_KEY.decode(base64.b64decode(value))


def header_value(told: DecoderTurn | TurnKey) -> str:
    return base64.b64encode(msgspec.msgpack.encode(told)).decode()


# --- A stream's notes, from a decoder to its router and from that to another decoder --------------


class Emitted(NamedTuple):
    """One output of an engine within a stream; the last has vLLM's reasons for its end."""

    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


# A comment within its event, which no reader of event streams passes on; see
# https://html.spec.whatwg.org/multipage/server-sent-events.html
NOTE_MARK = b": "
_EMITTED = msgspec.json.Decoder(list[Emitted])


def note(told: Sequence[Emitted] | TurnStats) -> bytes:
    """Write an event's outputs, or a turn's record, as the line that comes before an event."""
    return NOTE_MARK + msgspec.json.encode(told) + b"\n"


def read_notes(notes: bytes) -> list[Emitted]:
    """Read a stream's outputs from its notes; msgspec.DecodeError without any."""
    found = []
    for line in notes.splitlines():
        found += _EMITTED.decode(line.removeprefix(NOTE_MARK))
    return found


# A decoder's record of the turn, for the router: an answer in one piece has it in this header; in a
# stream it is a comment within the last event.
SUMMARY_HEADER = "x-conserve-summary"
SUMMARY_MARK = NOTE_MARK + b"{"
_SUMMARY = msgspec.json.Decoder(TurnStats)


def read_summary(said: bytes | str) -> TurnStats:
    return _SUMMARY.decode(said)


# --- Responses that decoders keep -----------------------------------------------------------------

# Before the id of a response: a decoder returns its `StoredResponse`, or forgets it.
STORED_PREFIX = "/conserve/responses/"
# The tenant whose response is asked for, if there are keys.
TENANT_HEADER = "x-conserve-tenant"


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and its request, whose input has the whole history, as a decoder keeps them."""

    history_id: str
    request: msgspec.Raw
    response: msgspec.Raw


# --- A request without its answer, from a router to an engine -------------------------------------

# Before the path of a turn: the engine checks the request and does not serve it.
CHECK_PREFIX = "/conserve/check"
# Before the path of a turn: the engine computes the prompt's KV and stores it; an encoder encodes
# its images.
PREFILL_PREFIX = "/conserve/prefill"
# After the path of a turn, with or without a prefix: limit the output to the room that there is.
ROOM_LEFT = "?room_left"
# After the path of Messages: answer with nothing that was generated.
NO_OUTPUT = "?no_output"

# --- kv_transfer_params, from an engine's client to LMCache's connector and back ------------------

# How much of the conversation LMCache may hold, in tokens: the prompt with which it came to this
# decoder, or that of the last turn that left its KV there.
STORED_TOKENS = "conserve.stored_tokens"
# How much of it the node's disk has beyond doubt; such a turn looks nothing up.
KEPT_TOKENS = "conserve.kept_tokens"
# Whether this request leaves its prompt's KV there.
PARK = "conserve.park"
# Where workers report that they have stored this request's prompt; see `deployments.engine.stored`.
STORED_TO = "conserve.stored_to"
# In the connector's configuration: LMCache's chunk, which its server is started with.
CHUNK_TOKENS = "conserve.chunk_tokens"
# An engine, or a server that reads another node's memory, waits this long for a transfer of KV;
# then the engine recomputes it. Only slower links than this need longer for a prompt.
TRANSFER_TIMEOUT_S = 10.0
# Set if a prefiller has just computed the prompt, and reported it as stored.
PREFILLED = "conserve.prefilled"
# LMCacheMPConnector answers a request that carries it with an object of the same name.
STATS = "cached_token_stats"
_OWN = "num_vllm_cached_tokens"
# It counts what lies beyond the engine's own tokens; num_lmcache_cached_tokens counts those too.
_LOADED = "num_lmcache_extra_cached_tokens"
# ConServe's connector adds, for a prompt that was reported as stored: tokens of whole chunks that
# were not found, and whether they were looked up more than once.
MISSED = "conserve.missed_tokens"
LATE = "conserve.late"
# In the connector's statistics, iterations' times: lists of the fields of a
# `conserve.placement.Step`.
STEPS = "conserve.steps"
# And identifiers of images that workers could not encode.
FAILED_IMAGES = "conserve.failed_images"
# And how long loads of KV have waited, each in seconds, that LMCache's server should have answered.
OVERDUE = "conserve.overdue_loads"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The tokens of a prompt by where they were found; None if the engine does not say.

    Attributes:
        lmcache_tokens: beyond those in the engine's own prefix cache.
        missed_tokens: just stored by a prefiller, and not found.
        late: whether what it had stored was looked up more than once.
    """

    own_tokens: int | None
    lmcache_tokens: int | None
    missed_tokens: int = 0
    late: bool = False


def transfer_params(
    stored_tokens: int | None = None,
    park: bool = False,
    prefilled: bool = False,
    kept_tokens: int | None = None,
) -> dict[str, Any]:
    """Return ``kv_transfer_params`` of a request whose `CachedTokens` are wanted."""
    known = {STORED_TOKENS: stored_tokens, KEPT_TOKENS: kept_tokens}
    told = {PARK: park or None, PREFILLED: prefilled or None}
    said = {STATS: True, **known, **told}
    return {name: value for name, value in said.items() if value is not None}


def cached_tokens(params: Mapping[str, Any] | None) -> CachedTokens:
    """Read where KV was found from the ``kv_transfer_params`` of an engine's answer."""
    stats = (params or {}).get(STATS) or {}
    own, loaded = stats.get(_OWN), stats.get(_LOADED)
    return CachedTokens(
        None if own is None else int(own),
        None if loaded is None else int(loaded),
        int(stats.get(MISSED, 0)),
        bool(stats.get(LATE)),
    )


# The member of ``ec_transfer_params`` in which an engine tells of a request's `Encoded`.
ENCODED = "conserve.encoded"


def encoded(params: Mapping[str, Any] | None) -> Encoded:
    """Read what images took from the ``ec_transfer_params`` of an engine's answer."""
    return Encoded(*(params or {}).get(ENCODED, ()))


# --- What an engine's own scheduler is told of a turn, and tells of its history -------------------

# Set by the decoder, and overrides what a client sends: kv_transfer_params are ours.
TURN = "conserve.turn"
# With a turn's last token: an `EngineTold`.
_TOLD = "conserve.told"


def history_key(history_id: str, incarnation: int) -> str:
    """Return a key for a history that a later one of the same id does not have."""
    return f"{incarnation} {history_id}"


def scheduled_turn(
    key: str, resume_s: float | None, last: bool, background: bool = False
) -> dict[str, Any]:
    """Return ``kv_transfer_params`` that tell an engine's scheduler of a history's turn."""
    return {TURN: {"key": key, "resume_s": resume_s, "last": last, "background": background}}


WaitFor = Literal["room", "place", "step", "load"]
"""A call waits for room in the KV, a place among the running calls, tokens of a step, or the load
of its own KV."""


class StageTimes(NamedTuple):
    """A turn's times in an engine that computes stages beside each other (Nova); 0: not there.

    Attributes:
        encode_wait_s: until all of its images were encoded, less the encodes themselves.
        encode_s: of the encodes for it, one after the other.
        prefill_s: of its prompt's part in the lane. Shorter prompts are prefilled in steps.
    """

    encode_wait_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0


NO_STAGES = StageTimes()


class EngineTold(NamedTuple):
    """An engine's account of a turn that has ended; None: its scheduler knows no histories.

    Attributes:
        waited_s, waited_for: how long the turn waited in the engine before it ran, and what for.
        kept_tokens, kept_s: what of its history stays there, and for how long that is pinned.
    """

    waited_s: float | None = None
    waited_for: str | None = None
    kept_tokens: int | None = None
    kept_s: float | None = None
    stages: StageTimes = NO_STAGES

    def params(self) -> dict[str, Any]:
        return {_TOLD: [*self[:-1], list(self.stages)]}


_NOTHING_TOLD = EngineTold()


def engine_told(params: Mapping[str, Any] | None) -> EngineTold:
    said = None if params is None else params.get(_TOLD)
    if said is None:
        return _NOTHING_TOLD
    told = EngineTold(*said)
    return told._replace(stages=StageTimes(*told.stages))
