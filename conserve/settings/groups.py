"""Groups of settings: of a role's engines, a tier's nodes, LMCache's servers, autoscaling."""

import math
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from conserve.settings.removed import sentences

# A role that names no tier runs on one of these two.
CPU_TIER, GPU_TIER = "cpu", "gpu"


# The type of the error that refuses names which were settings once.
REMOVED_TYPE = "removed_setting"


class Strict(BaseModel):
    """Refuses names that are no settings, and says of removed ones what replaces them.

    Attributes:
        prefix: of the group's names, with its dot.
    """

    # hide_input: a value may be a secret (an environment variable for an engine, for instance).
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    prefix: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, given: Any) -> Any:
        if isinstance(given, dict) and (said := sentences(cls.prefix, given)):
            raise PydanticCustomError(REMOVED_TYPE, "{said}", {"said": "\n  ".join(said)})
        return given


class RoleSettings(Strict):
    """The engines of one role: the prefillers or the decoders. A bare number sets ``replicas``."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="How many engines this role has; with `max_replicas`, the fewest.",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="The most engines that this role scales up to. Unset: it does not scale.",
    )
    num_cpus: float = Field(
        default=0.5, ge=0, description="Ray CPUs reserved for each worker of an engine."
    )
    num_gpus: float = Field(
        default=1,
        ge=0,
        description="Ray GPUs reserved for each worker of an engine; ignored on CPUs. With a part "
        "of one, an engine is told to take that part of its memory. Unset: as `gpus` has it.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Ray custom resources for each worker of an engine."
    )
    tier: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="The tier that this role runs on: a name under `tiers`, or else the Ray custom "
        "resource that marks its nodes. Unset: any node.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM engine arguments for this role; they override those of `engine`.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for this role's engines."
    )


class TierSettings(Strict):
    """Nodes of one kind, told by what Ray can see of them, and how their GPUs are run."""

    prefix = "tiers.NAME."

    accelerator_type: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="The tier's nodes have this accelerator type, by Ray's name (`A40`, `H100`).",
    )
    resource: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="The tier's nodes offer this Ray custom resource.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="The tier's nodes have these Ray labels."
    )
    power_cap: float | str | None = Field(
        default=None,
        description="The tier's GPUs are limited to this power while engines run on them: a number "
        "of watts, or a share of each GPU's default limit, such as `70%` (the paper: two thirds). "
        "Unset: their limits are left alone.",
    )
    sm_slots: int | None = Field(
        default=None,
        ge=1,
        le=10,
        description="How many tenths of a GPU's SMs each engine of the tier has to itself; those "
        "that may get the same GPU have ten together. Unset: an engine runs on all of them. "
        "Nothing on CPUs.",
    )

    @field_validator("power_cap", mode="after")
    @classmethod
    def _watts_or_share(cls, value: float | str | None) -> float | str | None:
        if value is None:
            return None
        number = str(value).strip()
        try:
            cap = float(number.removesuffix("%"))
        except ValueError:
            cap = 0.0
        most = 100.0 if number.endswith("%") else math.inf
        if not 0 < cap <= most or math.isinf(cap):
            raise ValueError("give a number of watts, or a share of up to 100%, such as 70%")
        return number if number.endswith("%") else cap

    @property
    def power_cap_w(self) -> float | None:
        """The cap in watts; None: there is none, or it is a fraction."""
        return self.power_cap if isinstance(self.power_cap, float) else None

    @property
    def power_cap_fraction(self) -> float | None:
        """The cap as a fraction of the default limit; None: there is none, or it is in watts."""
        cap = self.power_cap
        return float(cap.removesuffix("%")) / 100 if isinstance(cap, str) else None


class LMCacheSettings(Strict):
    """The LMCache server, one a node, through which KV moves from prefiller to decoder."""

    prefix = "lmcache."

    size_gb: float = Field(
        default=2.0,
        gt=0,
        description="Host memory on each node for KV in transit, and of parked conversations, in "
        "GiB. When it is full, the KV unused for longest is dropped. Unset: at most half of what "
        "is free, within the container's limit; on GPUs by the model's KV and decoders' room.",
    )
    port: int = Field(
        default=7610,
        ge=0,
        le=65534,
        description="Port on which a node's LMCache server listens for engines, and for other "
        "nodes' servers; the next one has its admin interface and metrics, on loopback. 0: free "
        "ones.",
    )

    @field_validator("port")
    @classmethod
    def _not_privileged(cls, value: int) -> int:
        if 0 < value < 1024:
            raise ValueError("a port from 1024 on, or 0 for one that is free")
        return value

    @property
    def http_port(self) -> int:
        """Port of the server's admin interface and metrics, on loopback. 0: a free one."""
        return self.port and self.port + 1


class AutoscalingSettings(Strict):
    """When a role with `max_replicas` gets more or fewer engines."""

    prefix = "autoscaling."

    window_s: float = Field(
        default=30.0, gt=0, description="Rates of arrival are averaged over this much time."
    )
    drain_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="How long a decoder that is to be removed keeps its conversations. Those left "
        "then are prefilled again elsewhere, each once its turn has ended. Engines are removed "
        "once there were too many for a fifth of this time.",
    )
