"""The JSON that clients get. `/openapi.json` shows the schemas of these structs.

Optional fields that an answer does not always have are `UNSET` where it leaves them out.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from conserve.events import Kind
from conserve.why import Cause
from conserve.wire import START_PHASES, Role, StartPhase

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(ge=0)]
Phase = Literal["reasoning", "acting", "paused"]


class Answer(msgspec.Struct):
    """A JSON object."""


# --- the application ------------------------------------------------------------------------------


class Alive(Answer):
    """Engines that are ready, by role, and those that start."""

    prefillers: Count
    decoders: Count
    starting: Annotated[
        dict[StartPhase, Count] | UnsetType,
        Meta(description=f"Engines that are not ready yet, by phase: {', '.join(START_PHASES)}."),
    ] = UNSET
    encoders: Annotated[
        Count | UnsetType, Meta(description="Engines that only encode, where any are wanted.")
    ] = UNSET


class Health(Alive, kw_only=True):
    """Whether turns can be served."""

    status: Literal["ok", "unavailable"]
    models: Annotated[
        dict[str, Literal["ok", "unavailable"]] | UnsetType, Meta(description="Of each of several.")
    ] = UNSET


class Live(Answer):
    """That this router's process answers."""

    status: Literal["ok"] = "ok"


class Readiness(Answer):
    """Whether this router can serve turns."""

    status: Literal["ready", "unavailable"]
    reason: Annotated[str | UnsetType, Meta(description="Why it cannot.")] = UNSET


class Versions(Answer):
    """The versions that the router's node has, and the model; null: it is not installed there."""

    conserve: str | None
    vllm: str | None
    lmcache: str | None
    ray: str | None
    model: str


class EngineLoad(Answer):
    """The work that an engine has. Means are over 30 s, and null without any such work."""

    prefill_tokens: Annotated[
        Count,
        Meta(description="Prompt tokens left to compute, without those that caches should have."),
    ]
    decodes: Annotated[Count, Meta(description="Requests past their first token.")]
    step_s: Annotated[Positive | None, Meta(description="Mean of iterations without a prefill.")]
    prefill_tokens_per_s: Annotated[Positive | None, Meta(description="Speed of prefills.")]
    adapters: Annotated[
        list[str] | UnsetType, Meta(description="The adapters that it has, as NAME@DIGEST.")
    ] = UNSET


class CacheCheck(Answer):
    """Tokens that were found of a prompt that the engine ran several times before it was ready.

    KV is kept in whole units of `unit_tokens`. With `sent_tokens` 0, no prompt that fits would be
    found; `host_tokens` is null where nothing is stored in host memory. `problem` says what to do.
    """

    unit_tokens: Count
    sent_tokens: Count = 0
    again_tokens: Count = 0
    appended_tokens: Count = 0
    host_tokens: Count | None = None
    lasted_s: Positive = 0.0
    problem: str = ""


class Engine(Answer, kw_only=True):
    """An engine that is ready."""

    id: str
    model: Annotated[str | UnsetType, Meta(description="Present where there are several.")] = UNSET
    role: Role
    hosts: Annotated[bool, Meta(description="Whether conversations are bound to it.")]
    url: str
    pid: Count
    leaving: Annotated[bool, Meta(description="Whether it only finishes what it has.")]
    capacity_tokens: Annotated[Count, Meta(description="KV space.")]
    max_model_len: Annotated[Count, Meta(description="Most tokens of prompt and output together.")]
    max_batched_tokens: Annotated[Count, Meta(description="Most tokens of one iteration.")]
    held_tokens: Annotated[Count | None, Meta(description="Occupancy; null: it hosts none.")]
    conversations: Count | None
    queued_tokens: Annotated[Count | None, Meta(description="Prefills sent there and not done.")]
    load: EngineLoad | None
    handoff_s: Annotated[
        dict[str, Positive],
        Meta(
            description="How many seconds longer prompts of this many tokens took when they were "
            "handed over, as tried at its start."
        ),
    ]
    cache_check: CacheCheck | None
    tier: str
    gpus: list[str]
    sm_slots: Annotated[
        Count | UnsetType, Meta(description="Tenths of its GPU's SMs that it has to itself.")
    ] = UNSET
    sms: Annotated[Count | UnsetType, Meta(description="Number of SMs in its slots.")] = UNSET
    cache_metrics: Annotated[
        str, Meta(description="Where its node's LMCache server has metrics, on that node alone.")
    ]


class Engines(Answer, tag_field="object", tag="list"):
    data: list[Engine]


class EngineDraining(Answer, tag_field="object", tag="engine.draining"):
    """An engine that takes nothing new, and whose conversations move between their turns."""

    id: str
    conversations: Annotated[Count, Meta(description="Those that it still has.")]


class Targets(Answer):
    """Addresses that Prometheus can scrape, and the labels of what it finds there."""

    targets: list[str]
    labels: dict[str, str]


class Model(Answer, tag_field="object", tag="model"):
    id: str
    created: Count
    owned_by: str
    max_model_len: Annotated[Count | None, Meta(description="null before a decoder is there.")]


class Models(Answer, tag_field="object", tag="list"):
    data: list[Model]


class AnthropicModel(Answer, tag_field="type", tag="model"):
    """A model, for requests with the header `anthropic-version`."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: Count | None
    max_tokens: Count | None


class AnthropicModels(Answer):
    """The models, for requests with the header `anthropic-version`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


# --- conversations --------------------------------------------------------------------------------


class Turn(Answer):
    """The last turn's tokens, images and times by stage, as engines counted them.

    Attributes:
        encoded_images: that an encoder computed for it.
        node_images: that engines took from their node's memory instead.
        encode_wait_s, encode_s, prefill_s: beside decodes of others; 0: not there.
        decode_s: from the first token to the last; 0: unknown, or a single token.
        why: the reasons for its wait, if it was slow and any are known.
    """

    prompt_tokens: Count
    output_tokens: Count
    decoder_cached_tokens: Count
    lmcache_tokens: Count
    encoded_images: Count
    node_images: Count
    encode_wait_s: Positive
    encode_s: Positive
    prefill_s: Positive
    decode_s: Positive
    why: str | UnsetType = UNSET


class RunningTool(Answer):
    """A tool that runs, by its client's report."""

    tool: str
    running_s: Positive
    call_id: str | UnsetType = UNSET


class History(Answer, kw_only=True):
    """One history of a conversation."""

    model: Annotated[str | UnsetType, Meta(description="Present where there are several.")] = UNSET
    adapter: Annotated[str | UnsetType, Meta(description="Present if it has one.")] = UNSET
    phase: Phase
    turns: Count
    held_tokens: Count
    shared_tokens: Annotated[Count, Meta(description="Those that other histories have, too.")]
    decoder: str | None
    moves: Count
    age_s: Positive
    idle_s: Positive
    last_turn: Turn | None
    hints: dict[str, Any]
    called: Annotated[
        str | None,
        Meta(description="Tool called by its last answer; empty: none; null: not known."),
    ]
    running_tools: list[RunningTool]


class Event(Answer):
    """An event of a conversation; it has more fields, by its kind."""

    kind: Kind
    at: Annotated[Positive, Meta(description="Unix time.")]


class Conversation(Answer, tag_field="object", tag="conversation", kw_only=True):
    """A live conversation."""

    id: str
    tenant: Annotated[str | UnsetType, Meta(description="Present where there are keys.")] = UNSET
    phase: Phase
    parent: Annotated[str | None, Meta(description="What began it, as far as is known.")]
    children: Annotated[list[str], Meta(description="Live ones that it began, the oldest first.")]
    children_total: Count
    turns: Count
    held_tokens: Count
    decoder: str | None
    moves: Count
    ttfet_s: Positive | None
    created: Count
    age_s: Positive
    last_used: Count
    idle_s: Positive
    last_turn: Turn | None
    energy_estimate_j: Positive | None
    running_tools: Count
    histories: Annotated[list[History], Meta(min_length=1)]
    histories_total: Count
    events: list[Event] | UnsetType = UNSET


class Conversations(Answer, tag_field="object", tag="list"):
    data: list[Conversation]
    total: Count


class ConversationEnded(Answer, tag_field="object", tag="conversation.deleted"):
    id: str
    deleted: Literal[True]


class ToolsRunning(Answer):
    running_tools: Count


class ProgramReleased(Answer):
    program_id: str
    released: bool


class CacheCause(Answer):
    """Prompt tokens that engines computed for one cause."""

    cause: Cause
    name: str
    tokens: Count
    share: Annotated[float, Meta(ge=0, le=1, description="Of all that were computed.")]
    turns: Count
    seconds: Annotated[Positive, Meta(description="Of their prefills, as engines measured them.")]
    joules: Annotated[Positive | None, Meta(description="By these seconds; null: not known.")]
    advice: Annotated[str, Meta(description="What to set, or to tell the client's author.")]
    example: Annotated[str | UnsetType, Meta(description="A turn's conversation.")] = UNSET
    tenant: Annotated[str | UnsetType, Meta(description="The example's.")] = UNSET
    where: Annotated[str | UnsetType, Meta(description="The example's prefix broke.")] = UNSET


class Cache(Answer, tag_field="object", tag="cache"):
    """Prompt tokens that engines computed, by cause, product in `User-Agent`, and tenant."""

    model: str
    minutes: Annotated[Count, Meta(description="Whole minutes before this one that count, too.")]
    tokens: Count
    again_tokens: Annotated[Count, Meta(description="Of all causes but `first` and `append`.")]
    causes: list[CacheCause]
    clients: dict[str, dict[Cause, Count]]
    tenants: dict[str, dict[Cause, Count]]


class Recording(Answer, tag_field="object", tag="recording"):
    """Turns that have ended, by lengths, times and digests, without text."""

    model: str
    block_tokens: Count
    dropped: Annotated[Count, Meta(description="Turns that were not asked for in time.")]
    deployment: dict[str, Any]
    newest: Annotated[Count, Meta(description="Ask after this one.")]
    turns: list[dict[str, Any]]


# --- responses ------------------------------------------------------------------------------------


class InputTokens(Answer, tag_field="object", tag="response.input_tokens"):
    input_tokens: Count


class InputItems(Answer, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(Answer, tag_field="object", tag="response"):
    id: str
    deleted: Literal[True]


# --- answers of engines ---------------------------------------------------------------------------


class EngineAnswer(Answer):
    """An answer that an engine gives, as far as clients may rely on it."""


class CachedTokens(Answer):
    cached_tokens: Count | None


class Usage(Answer):
    prompt_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens | None = None


class ChatMessage(Answer):
    role: str


class ChatChoice(Answer):
    index: Count
    message: ChatMessage


class ChatCompletion(EngineAnswer, tag_field="object", tag="chat.completion"):
    id: str
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Answer):
    index: Count
    text: str


class Completion(EngineAnswer, tag_field="object", tag="text_completion"):
    id: str
    created: Count
    model: str
    choices: list[TextChoice]
    usage: Usage


class ContentUsage(Answer):
    input_tokens: Count
    output_tokens: Count


class Content(Answer):
    """An object that has more fields, by its type."""

    type: str


class Message(EngineAnswer, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    content: Annotated[list[Content], Meta(description="Empty if max_tokens is 0.")]
    model: str
    usage: ContentUsage


class Response(EngineAnswer, tag_field="object", tag="response"):
    id: str
    created_at: Count
    model: str
    status: Literal["completed", "incomplete"]
    output: list[Content]
    usage: ContentUsage


class TokenCount(EngineAnswer):
    input_tokens: Count


class Tokens(EngineAnswer):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None = None


class Text(EngineAnswer):
    prompt: str
