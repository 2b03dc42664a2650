"""The settings of an application, and what follows from them together."""

import os
import re
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar, cast, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator

from conserve.adapters import check_name
from conserve.placement import POLICIES, PlacementPolicy, PolicyName
from conserve.settings.checks import CHECKS
from conserve.settings.engine_arguments import without_expandable_segments, without_reserved
from conserve.settings.groups import (
    CPU_TIER,
    GPU_TIER,
    AutoscalingSettings,
    EnvironmentSettings,
    LMCacheSettings,
    LogSettings,
    MediaSettings,
    RoleSettings,
    Strict,
    TierSettings,
    TLSSettings,
    TracingSettings,
    absolute,
)
from conserve.settings.models import OWN, each_of, own_line, slug_of
from conserve.wire import Role

T = TypeVar("T")

EMBEDDED_MODEL = "embedded"
# Models that need no download, and the names under which clients ask for them.
EMBEDDED_MODELS = {
    EMBEDDED_MODEL: "conserve-embedded",
    "embedded-vision": "conserve-embedded-vision",
}
# Beyond vLLM's scheduler: AgentServe's chunks and lane, MARS's order and retention.
MECHANISMS = ("chunks", "order", "retention", "lane")
_JOINED = r"^(chunks|order|retention|lane)(\+(chunks|order|retention|lane))*$"
_SCHEDULERS = {"vllm": (), "conversation": MECHANISMS[:3], "conversation_lane": MECHANISMS}


class SettingsError(ValueError):
    """The settings are not usable.

    Args:
        problems: a line each, which begins with a setting's name and says what would be right.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Settings(Strict):
    """Everything that can be set about a ConServe application."""

    model: str = Field(
        default=EMBEDDED_MODEL,
        min_length=1,
        description="The model that is served: a Hugging Face id or a local path; `embedded`, and "
        "`embedded-vision`, which sees, need no download.",
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="The name under which clients ask for the model. Unset: `model`, and "
        "`conserve-` before it for the embedded ones.",
    )
    aliases: list[str] = Field(
        default_factory=list,
        description="Other names under which clients ask for the model; one that ends in `*` "
        "stands for all that begin so, such as `claude-haiku-*`.",
    )
    models: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Several models behind one door, by the names under which clients ask for "
        "them. Each has engines and conversations of its own, and may have its own "
        f"{', '.join(f'`{name}`' for name in OWN)}; what it leaves out is what is set beside "
        "`models`. `model` is the name by default.",
    )
    default_model: str | None = Field(
        default=None,
        min_length=1,
        description="The model for requests that name one that is not served, or none of several. "
        "Unset: these are refused with 404.",
    )
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters of the model, by the names under which clients ask for them: "
        "folders as PEFT writes them, on each engine's node and the router's.",
    )
    adapters_file: str | None = Field(
        default=None,
        min_length=1,
        description="File of more adapters, on the router's node, which `conserve adapters` "
        "changes while the application runs. There need be none at the start.",
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="What engines run on. `auto`: GPUs if the Ray cluster has any, else CPUs.",
    )
    gpus: int | None = Field(
        default=None,
        ge=1,
        le=8192,
        description="How many GPUs the engines have; where there are more engines, they share "
        "them, with parts of their memory by the model's size. Unset: all that Ray has; shared "
        "only if there is one, and `placement` has prefillers that keep no conversations.",
    )
    prefillers: RoleSettings = Field(
        default_factory=RoleSettings,
        description="How many engines prefill conversations' first turns. Unset, on one GPU: none "
        "under `elastic`, as one engine does all the work.",
    )
    decoders: RoleSettings = Field(
        default_factory=lambda: RoleSettings(replicas=2),
        description="How many engines do everything else: decode, and prefill later turns. "
        "Unset, on GPUs: one for each GPU that no other engine has, and at least one.",
    )
    encoders: RoleSettings = Field(
        default_factory=lambda: RoleSettings(replicas=0),
        description="How many engines only encode new images, for the others on their node. They "
        "do not scale.",
    )
    tiers: dict[str, TierSettings] = Field(
        default_factory=dict, description="Kinds of nodes by name, which roles' `tier` refers to."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM engine arguments for all roles (`max_model_len`, `dtype`, ...).",
    )
    lmcache: LMCacheSettings = Field(
        default_factory=LMCacheSettings,
        description="The LMCache server through which KV is handed over.",
    )
    profile: str | None = Field(
        default=None,
        min_length=1,
        description="The engines' profile: a file that `conserve profile` wrote, or the name of "
        "one that comes with ConServe. Needed to scale prefillers, and for shares of stages.",
    )
    autoscaling: AutoscalingSettings = Field(
        default_factory=AutoscalingSettings, description="How roles with `max_replicas` scale."
    )
    share_gpus: bool = Field(
        default=False,
        description="Whether an engine of a model with `max_replicas` ends early, for another "
        "model that lacks GPUs: once what it holds was not used for as long as an engine takes to "
        "start.",
    )
    drain_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="How long a router that ends serves what runs, and a decoder that is no longer "
        "needed keeps its conversations. Those left then are prefilled again elsewhere, each once "
        "its turn has ended. Engines are removed once there were too many for a fifth of this "
        "time.",
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address that the router listens on. One that is not loopback wants "
        "`keys_file`, or `unauthenticated`.",
    )
    keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="File of API keys, on the router's node, as `conserve keys` makes it: every "
        "request then needs a key. Unset: none does.",
    )
    unauthenticated: bool = Field(
        default=False,
        description="Whether whoever reaches `host` may use everything without a key, where `host` "
        "is not loopback: for a network, or a gateway, that lets nobody else in.",
    )
    tls: TLSSettings = Field(
        default_factory=TLSSettings, description="The router's certificate, if it has one."
    )
    nodes: Literal["auto", "one", "several"] = Field(
        default="auto",
        description="With `several`, KV also moves between nodes, whose LMCache servers share it; "
        "with `one` it does not. `auto`: as many as Ray has when the application starts.",
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port that the router listens on.")
    routers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="How many router processes there are; those on one node share the port.",
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Names that are as good as loopback's. A router on loopback goes by them in "
        "`Host`: those of a proxy on its machine. And web pages of such an `Origin` may use a "
        "router and read its answers (CORS); so may all pages where `host` is not loopback and "
        "keys are needed.",
    )
    max_body_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=1024,
        description="Longest request body, in bytes; a longer one is refused with 413. To parse "
        "one holds up other streams for some 2 ms a MiB, here and in the engine.",
    )
    allowed_media_domains: list[str] = Field(
        default_factory=list,
        description="Domains that the router may fetch images, audio and video from, at public "
        "addresses and without following redirects. None: media come in `data:` URLs only.",
    )
    media: MediaSettings = Field(
        default_factory=MediaSettings, description="Limits of a request's images, audio and video."
    )
    placement: str = Field(
        default="elastic",
        json_schema_extra={
            "anyOf": [
                {"enum": list(get_args(PolicyName))},
                {"pattern": r"^(conversation:[0-9]+|per_turn:[0-9.]+)$"},
            ]
        },
        description="Policy that places conversations. `elastic` prefills wherever all "
        "conversations together wait least for it, and has prefillers host conversations, too. "
        "`conversation` is the paper's: prefillers compute first prompts, and nothing else. "
        "`collocated`, `full_disaggregation` and `per_turn` are baselines to compare them with. "
        "Two take a number: with `conversation:TOKENS` decoders prefill shorter first prompts, and "
        "`per_turn:SHARE` sends that share of later turns to a prefiller, by mistake.",
    )
    like: Literal["conserve_paper", "thunderagent", "mars", "agentserve", "nova"] | None = Field(
        default=None,
        description="A paper's system, as near as ConServe has it: sets what docs/how/papers.md "
        "lists, where it is not given. Unset: ConServe's own defaults.",
    )
    engine_scheduler: str = Field(
        default="vllm",
        json_schema_extra={"anyOf": [{"enum": list(_SCHEDULERS)}, {"pattern": _JOINED}]},
        description="Who decides within a decoder what its next step runs. `conversation`: who "
        "asks for little, and had little, goes first; prefills are cut so that no answer's tokens "
        "come late; and a history's KV is kept between turns. `conversation_lane`: the same, and "
        "long prompts and appends are computed beside steps while others decode, and not in them, "
        "and so are images encoded; on CPUs both take turns, and only images gain. `vllm`: as vLLM "
        "does it, first come first served. Or some of these, joined by `+`: `chunks`, `order`, "
        "`retention`, `lane`.",
    )
    tpot_bound_s: float | None = Field(
        default=None,
        gt=0,
        description="With `engine_scheduler` `conversation`, or others with `chunks`, the time per "
        "output token above which a step's prefills are cut. Unset: twice the time of a step "
        "without prefills, and at least twice a lone decode, which is measured at the start.",
    )
    pausing: bool = Field(
        default=True,
        description="Whether idle conversations give up their room where others need it; what they "
        "have stays with the engine until it needs the space, and in host memory "
        "(`lmcache.size_gb`), where turns on a decoder that is half full leave it, too. `off`: as "
        "in the paper. Not with `full_disaggregation` and `per_turn`, whose prefillers go on with "
        "histories.",
    )
    queue_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="How long a conversation may wait for room; after that it is refused with 429.",
    )
    idle_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="A conversation that has not been used for this long counts as ended.",
    )
    continue_streams: bool = Field(
        default=True,
        description="Whether a streamed answer goes on at another decoder if its own is lost.",
    )
    volatile_text: list[Literal["billing_header", "times"]] = Field(
        default=["billing_header"],
        description="Text of system prompts that is another one in each turn, and by which no "
        "history is recognised. `billing_header`: Claude Code's `x-anthropic-billing-header`, "
        "which is taken out of prompts too; `times`: clock times with seconds.",
    )
    special_tokens_in_text: bool = Field(
        default=False,
        description="Whether `<|im_end|>` and the like in a chat's messages and tools act as the "
        "model's special tokens, as in vLLM. A page that an agent reads can then begin a message.",
    )
    log: LogSettings = Field(
        default_factory=LogSettings, description="How turns and events are logged."
    )
    tracing: TracingSettings = Field(
        default_factory=TracingSettings, description="Whether and where turns are traced."
    )
    environments: EnvironmentSettings = Field(
        default_factory=EnvironmentSettings,
        description="Where agents' tools run, if clients may run commands at all.",
    )

    # The settings of each of several models; none: there is one, with these.
    _each: "dict[str, Settings]" = PrivateAttr(default_factory=dict)

    @field_validator("engine", mode="after")
    @classmethod
    def _engine_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        return without_reserved(value, "engine")

    @model_validator(mode="after")
    def _role_arguments(self) -> Self:
        for role in ("prefillers", "decoders", "encoders"):
            own: RoleSettings = getattr(self, role)
            without_reserved(own.engine, f"{role}.engine")
            without_expandable_segments(own.env, f"{role}.env")
        return self

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.models:
            self._each = each_of(self)
        if self.default_model not in (None, *self.each):
            names = ", ".join(self.each)
            raise ValueError(f"default_model: {self.default_model!r} is not served; give {names}")
        scale = (role.max_replicas for own in self.each.values() for _, role in own.roles)
        if self.share_gpus and not (len(self.each) > 1 and any(scale)):
            raise ValueError("share_gpus: for several models; give some of them max_replicas")
        for check in () if self.models else CHECKS:
            if problems := [*check(self)]:
                raise ValueError("\n".join(problems))
        return self

    _whole_path = field_validator("keys_file", "adapters_file", mode="after")(absolute)

    @field_validator("adapters", mode="after")
    @classmethod
    def _whole_paths(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            check_name(name)
        return {name: os.path.abspath(os.path.expanduser(path)) for name, path in value.items()}

    @field_validator("engine_scheduler", mode="after")
    @classmethod
    def _mechanisms_are_known(cls, value: str) -> str:
        if value not in _SCHEDULERS and not set(value.split("+")) <= set(MECHANISMS):
            raise ValueError("give vllm, conversation, conversation_lane, or chunks+order+...")
        return value

    @field_validator("placement", mode="after")
    @classmethod
    def _policy_and_its_number(cls, value: str) -> str:
        name, colon, number = value.partition(":")
        if name not in get_args(PolicyName):
            raise ValueError(f"give one of {', '.join(get_args(PolicyName))}")
        if not colon:
            return value
        if name not in ("conversation", "per_turn"):
            raise ValueError(f"{name} takes no number")
        if name == "conversation" and not (number.isascii() and number.isdecimal()):
            raise ValueError("give conversation:TOKENS, with a whole number of tokens")
        plain = number.isascii() and number.replace(".", "", 1).isdecimal()
        if name == "per_turn" and not (plain and float(number) <= 1):
            raise ValueError("give per_turn:SHARE, with a number from 0 to 1")
        return value

    @field_validator("tiers", mode="after")
    @classmethod
    def _tier_names(cls, value: dict[str, TierSettings]) -> dict[str, TierSettings]:
        for name in value:
            if name in (CPU_TIER, GPU_TIER):
                raise ValueError(f"{name!r} is the name of the tier of roles that name none")
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ValueError(f"{name!r} is no name: use letters, digits, and . _ -")
        return value

    @property
    def each(self) -> "dict[str, Settings]":
        """The settings of each model, by its name; of a single one, these."""
        return self._each or {self.model_id: self}

    def with_each(self, each: "dict[str, Settings]") -> "Settings":
        """These settings, with others for their models."""
        if not self._each:
            (only,) = each.values()
            return only
        copy = self.model_copy()
        copy._each = each
        return copy

    def with_common(self, **values: Any) -> "Settings":
        """These settings, with other values of some that all models have in common."""
        copy = self.model_copy(update=values)
        each = {name: own.model_copy(update=values) for name, own in self._each.items()}
        return copy.with_each(each) if each else copy

    @property
    def slug(self) -> str:
        """The model's name in those of deployments and files; empty: there is only one."""
        return slug_of(self.model_id) if self.models else ""

    @property
    def policy_name(self) -> PolicyName:
        """The placement policy's name, without its number."""
        return cast(PolicyName, self.placement.partition(":")[0])

    @property
    def prefiller_replicas(self) -> int:
        """Prefillers to start: none where every engine does everything."""
        return self.prefillers.replicas if self.policy_class.uses_prefillers else 0

    @property
    def policy_class(self) -> type[PlacementPolicy]:
        """The class of the placement policy, which says what the policy does."""
        return POLICIES[self.policy_name]

    @property
    def policy_number(self) -> float:
        """The number of the placement policy; 0: none is given."""
        return float(self.placement.partition(":")[2] or 0)

    @property
    def prefillers_host(self) -> bool:
        """Whether conversations are bound to prefillers, too."""
        return self.policy_class.hosts_prefillers and self.prefiller_replicas > 0

    def hosts(self, role: Role) -> bool:
        """Whether conversations are bound to engines of a role."""
        return role == "decoder" or (role == "prefiller" and self.prefillers_host)

    def of_role(self, role: Role) -> RoleSettings:
        """The settings of a role's engines."""
        own: RoleSettings = getattr(self, f"{role}s")
        return own

    @property
    def roles(self) -> list[tuple[str, RoleSettings]]:
        """The roles that have engines, by their settings' names; decoders are the last."""
        found = [("encoders", self.encoders)] if self.encoders.replicas else []
        if self.prefiller_replicas:
            found.append(("prefillers", self.prefillers))
        return [*found, ("decoders", self.decoders)]

    def workers_of(self, role: RoleSettings) -> int:
        """Workers of each engine of a role."""
        arguments = self.engine | role.engine
        tensor, pipeline = (
            int(arguments.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline")
        )
        return tensor * pipeline

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Which of `MECHANISMS` schedule within engines that host conversations."""
        return _SCHEDULERS.get(self.engine_scheduler, tuple(self.engine_scheduler.split("+")))

    @property
    def schedules_conversations(self) -> bool:
        """Whether engines that host conversations schedule by them."""
        return bool(self.mechanisms)

    @property
    def runs_inside(self) -> tuple[str, ...]:
        """The settings that need the add-on `conserve_inside`, as they are given."""
        given = {
            f"engine_scheduler={self.engine_scheduler}": bool(self.mechanisms),
            "tpot_bound_s": self.tpot_bound_s is not None,
            "media.tower_layers": self.media.tower_layers is not None,
        }
        slots = {f"tiers.{name}.sm_slots": one.sm_slots for name, one in self.tiers.items()}
        given |= {name: number is not None for name, number in slots.items()}
        return tuple(name for name, is_given in given.items() if is_given)

    @property
    def prefills_later_turns(self) -> bool:
        """Whether prefillers go on with histories, which they read from host memory."""
        return self.policy_class.prefills_later_turns

    @property
    def moves_turns(self) -> bool:
        """Whether a later turn may go to another engine, which loads its history."""
        engines = self.prefiller_replicas + self.decoders.replicas
        return self.policy_class.moves_turns and self.parks and engines > 1

    @property
    def parks(self) -> bool:
        """Whether turns may leave their KV in host memory, too."""
        return self.pausing and self.policy_class.pauses

    def on_nodes(self, alive: int) -> "Settings":
        """These settings on a cluster of ``alive`` nodes, with nothing left to choose."""
        nodes = self.nodes
        if nodes == "auto":
            nodes = "several" if alive > 1 else "one"
        return self.with_common(nodes=nodes)

    @property
    def scheme(self) -> Literal["http", "https"]:
        """The scheme of the router's URL."""
        return "http" if self.tls.files is None else "https"

    @property
    def engine_host(self) -> str:
        """The address that engines listen on; ``node`` is that of their own node."""
        return "node" if self.nodes == "several" else "127.0.0.1"

    @property
    def adapts(self) -> bool:
        """Whether engines take adapters of the model."""
        return bool(self.adapters or self.adapters_file)

    @property
    def model_id(self) -> str:
        """The name under which clients ask for the model."""
        if self.served_model_name:
            return self.served_model_name
        return EMBEDDED_MODELS.get(self.model, self.model)

    def said(self, line: str) -> str:
        """A problem's line as it names this model's setting, of one model or of several."""
        return own_line(self.model_id, line) if self.models else line

    def for_each(self, work: Callable[["Settings"], T]) -> dict[str, T]:
        """Results of ``work`` for each model; raises `SettingsError` with all their problems."""
        found: dict[str, T] = {}
        problems: list[str] = []
        for name, own in self.each.items():
            try:
                found[name] = work(own)
            except SettingsError as error:
                problems += map(own.said, error.problems)
        if problems:
            raise SettingsError(*dict.fromkeys(problems))
        return found
