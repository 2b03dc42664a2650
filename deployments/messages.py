"""The messages between routers, engines, nodes' actors and the conversation table."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from conserve.encoders import Encoder
from conserve.hints import Hints
from conserve.history import History
from conserve.holdings import Parked
from conserve.recognition import Chain, Digest
from conserve.tenants.limits import Limits
from conserve.turn import Reason, TurnKey
from conserve.wire import NO_LACK, Lack, Role, StartPhase
from deployments.answers import CacheCheck

# Ray's name for a resource that the head node alone has.
HEAD_NODE = "node:__internal_head__"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine replica that is ready to serve.

    Attributes:
        id: the Serve replica's unique id.
        url: its own HTTP server, for routers.
        capacity_tokens: its KV space.
        max_model_len: the longest that prompt plus output may be, in tokens.
        holds: a decoder's live conversations, in case the table does not know them.
        tier: its kind of hardware; see `hetero.tiers`.
        gpus: UUIDs of its GPUs; empty where they are not known.
        sm_slots: how many tenths of its GPU's SMs it has to itself; 0: it runs on all.
        sms: how many SMs those are.
        leaving: whether it has to end, and takes nothing new.
        max_batched_tokens: most tokens of one iteration, prefills' chunks included.
        host_tokens: how many tokens of KV its node's LMCache server has room for.
        wanted_replicas: how many engines of its role the last table wanted; a new table goes on
            from there.
        parked: what its histories have in host memory.
        also_hosts: whether it is a prefiller that conversations are bound to as well.
        registration: how often it has registered, if it begins turns by itself; else 0.
        kind: engines of one kind take the same time for the same work.
        cache_metrics: host and port where its node's LMCache server has its metrics, on that node's
            loopback.
        handoffs: lengths of prompts in tokens, and how many seconds longer each took when it was
            handed over than when it was computed here, as tried at the engine's start.
        cache_check: what its caches found then.
    """

    id: str
    role: Role
    url: str
    pid: int
    capacity_tokens: int
    max_model_len: int
    holds: list[History] = field(default_factory=list)
    tier: str = ""
    gpus: tuple[str, ...] = ()
    sm_slots: int = 0
    sms: int = 0
    leaving: bool = False
    wanted_replicas: int | None = None
    max_batched_tokens: int = 0
    host_tokens: int = 0
    parked: list[Parked] = field(default_factory=list)
    also_hosts: bool = False
    registration: int = 0
    kind: str = ""
    handoffs: tuple[tuple[int, float], ...] = ()
    cache_metrics: str = ""
    cache_check: CacheCheck | None = None

    @property
    def hosts(self) -> bool:
        """Whether conversations are bound to it."""
        return self.role == "decoder" or self.also_hosts


@dataclass(frozen=True, slots=True)
class EngineStarting:
    """An engine replica that is not ready yet, and what it does now."""

    id: str
    phase: StartPhase


@dataclass(frozen=True, slots=True)
class NodeCache:
    """A node's LMCache server, as those of other nodes reach it.

    Attributes:
        id: names this run of the server; another after every restart.
        port: where it answers look-ups.
        transfer_port: where the memory that holds KV can be read.
    """

    id: str
    host: str
    port: int
    transfer_port: int


@dataclass(frozen=True, slots=True)
class Heard:
    """The table's answer to an engine's beat.

    Attributes:
        ended: histories (and incarnations) that the engine has to forget.
        wanted_replicas: how many engines of its role there should be.
        decided_s: when that was decided, or confirmed; Unix time.
        holds: histories, their incarnations, and for how many seconds from now the engine has to
            hold what it has of them.
        touched: histories whose copies in host memory should outlive others, since their turns
            wait for room.
        forgotten: ended conversations, whose files the node's disk should no longer have.
    """

    ended: list[tuple[str, int]]
    wanted_replicas: int
    decided_s: float
    holds: list[tuple[str, int, float]] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The settings of these names, which change while an application runs."""

    queue_timeout_s: float
    idle_timeout_s: float


@dataclass(frozen=True, slots=True)
class CountingEngine:
    """An engine that can count a prompt.

    Attributes:
        max_model_len: as an `EngineInfo` has it; None: not known.
    """

    id: str
    url: str
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class RouterHeard:
    """The table's answer to a router's beat.

    Attributes:
        encoders: those that it may send images to.
        counters: engines that can count a prompt, the likeliest to compute it first.
        can_serve: whether an engine can take turns; None: a new table does not know that yet.
        lack: the GPUs that this model lacks, where models share them.
    """

    encoders: list[Encoder]
    counters: list[CountingEngine]
    can_serve: bool | None
    lack: Lack = NO_LACK


@dataclass(frozen=True, slots=True)
class TurnTenant:
    """A turn's tenant, and what it may have at a time."""

    name: str
    limits: Limits
    weight: int = 1


@dataclass(frozen=True, slots=True)
class EventQuery:
    """Asks for events.

    Attributes:
        after: the number of the last one that was told; None: of the newest there is.
        kinds: empty: all kinds.
        tenant: None: all conversations', and engines'.
        conversation_id: scoped to its tenant; None: all.
        patience_s: how long to wait where there are none yet.
    """

    after: int | None
    kinds: Collection[str] = ()
    tenant: str | None = None
    conversation_id: str | None = None
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EventPage:
    """The events after a number.

    Attributes:
        newest: the number of the newest event, whether it was asked for or not.
        missed: how many there were that are not kept any more.
        events: each one's number, kind and JSON.
    """

    newest: int
    missed: int
    events: Sequence[tuple[int, str, bytes]]


@dataclass(frozen=True, slots=True)
class BeginTurn:
    """Asks where a turn goes, and for room there.

    Attributes:
        number: the router's for this call, by which it can be cancelled.
        explicit_id: the conversation's, scoped to the tenant, if the client has stated it.
        chain: None for a completion, which is recognised by its id alone.
        tenant: None where there are no keys.
        history_id: None until the table has told it.
        refused_by: the decoder to which it went straight, in vain.
        waited_s: how long ago its request came.
        prompt_tokens: None: not counted, since it seems to be bound.
        encode_tokens: embeddings of its images that are not encoded yet, if it is counted.
        system_tokens: of its tools and leading system messages, if it is counted.
        digest: see `wire.DecoderTurn`; empty: it rejoins no answer.
        adapter: its adapter's id; empty: it has none.
    """

    router_id: str
    number: int
    explicit_id: str | None
    chain: Chain | None
    tenant: TurnTenant | None = None
    history_id: str | None = None
    hints: Hints | None = None
    refused_by: str | None = None
    waited_s: float = 0.0
    prompt_tokens: int | None = None
    encode_tokens: int = 0
    system_tokens: int = 0
    digest: bytes = b""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Tells where a turn goes; `prefiller_id` is set where a remote prefill comes first.

    Attributes:
        later: whether this decoder had a turn of the history before.
        looks_up: whether LMCache may have more of the history than this decoder.
        root: the digest of the first prompt, of a chat's history that begins.
        points: of a history that begins, its beginnings whose length is known (`Points.packed`).
        parks: whether it leaves its prompt's KV in host memory.
        direct: whether the history's next turn may go to the decoder without asking.
        rejoins: whether its answer is under way there, for the same request.
    """

    turn: TurnKey
    decoder_id: str
    decoder_url: str
    prefiller_id: str | None = None
    prefiller_url: str | None = None
    later: bool = False
    looks_up: bool = False
    root: Digest | None = None
    points: bytes = b""
    parks: bool = False
    direct: bool = False
    rejoins: bool = False
    reason: Reason = "home"


@dataclass(slots=True)
class Checked:
    """The prompts of a turn that an engine would serve.

    Attributes:
        prompts: the token ids of each.
        multimodal: whether they hold more than these, such as images.
        encode_tokens: embeddings of images that the engine's node has not encoded.
    """

    prompts: list[list[int]]
    multimodal: bool
    encode_tokens: int


@dataclass(frozen=True, slots=True)
class Uncounted:
    """A turn is bound nowhere, and has to be counted before it is begun; nothing is kept of it."""

    history_id: str
    counter: CountingEngine


@dataclass(frozen=True, slots=True)
class Refusal:
    """`conserve.errors.ApiError` as plain data: what was asked for cannot be had now."""

    status: int
    message: str
    code: str
    retry_after_s: int | None = None


class SchedulerLoad(msgspec.Struct, frozen=True):
    """An engine's scheduler that knows conversations, as it tells the table with a beat.

    It has calls and blocks of now, and counts since the engine's start.

    Attributes:
        waiting, running, preempted: calls on each level, from 0.
        running_kinds, begun: calls by kind: cold, resume or decode.
        cut: chunks that were made smaller, or put off, for decodes.
        parts: prompts that began without room for all of them.
        reclaimed_blocks: pinned ones that were given up before their time.
        lane_tokens: left to compute in the lane; None, like all of the lane's, without one.
        lane_prefills: by outcome: done, or failed and computed inline.
        decode_sms: SMs that steps have, where the lane has the others; None if no border moves.
    """

    waiting: list[int]
    running: list[int]
    running_kinds: dict[str, int]
    begun: dict[str, int]
    cut: dict[str, int]
    parts: int
    preempted: list[int]
    reclaimed_blocks: int
    pinned_blocks: int
    free_blocks: int
    blocks: int
    tpot_s: float
    tpot_bound_s: float
    budget_tokens: int
    lane_waiting: int | None = None
    lane_running: int | None = None
    lane_tokens: int | None = None
    lane_prefills: dict[str, int] | None = None
    lane_computed_tokens: int | None = None
    decode_sms: int | None = None


@dataclass(frozen=True, slots=True)
class HostPressure:
    """The load of the machine that tools run on, as what runs them has observed it.

    Attributes:
        running_tools: commands that run there now.
        cpu_pressure: the share of time, 0 to 1, in which a process waits for a CPU.
    """

    running_tools: int = 0
    cpu_pressure: float = 0.0


class Standing(NamedTuple):
    """The table's view of a conversation; ``place`` is in the queue, from 0."""

    state: Literal["unknown", "waiting", "live"]
    place: int = 0


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """How conversations stand with the table.

    Attributes:
        table: tells the table's lives apart.
        standings: of those asked for that it knows; None: it is being restarted, and does not know
            yet.
    """

    table: int
    standings: dict[str, Standing] | None
