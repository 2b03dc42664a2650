"""Groups of settings: of engines, tiers, LMCache's servers, autoscaling, tool environments."""

import math
import os
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

# A role that names no tier runs on one of these two.
CPU_TIER, GPU_TIER = "cpu", "gpu"
# Names that Ray and Prometheus take, and those of environment variables.
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
# Of environments' files, where no other folder is set.
ENVIRONMENTS_ROOT = "/var/tmp/conserve-environments"


def absolute(path: str | None) -> str | None:
    # The process that opens it has a working directory of its own.
    return None if path is None else os.path.abspath(os.path.expanduser(path))


class Strict(BaseModel):
    """Refuses names that are no settings."""

    # hide_input: a value may be a secret (an environment variable for an engine, for instance).
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would take true for 1.
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise PydanticCustomError("number_type", "give a number")
        return value


class RoleSettings(Strict):
    """The engines of one role, such as the decoders. A bare number sets ``replicas``."""

    @model_validator(mode="before")
    @classmethod
    def _replicas_alone(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()):
            return {"replicas": int(value)}
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        reference = handler(core_schema)
        own = handler.resolve_ref_schema(reference)
        number = own["properties"]["replicas"]
        own["type"] = [own["type"], "integer"]
        own |= {key: number[key] for key in ("minimum", "maximum")}
        return reference

    replicas: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="How many engines this role has; with `max_replicas`, the fewest. Without "
        "prefillers, each decoder computes its conversations' prompts.",
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
    tier: str | None = Field(
        default=None,
        pattern=NAME,
        description="The tier that this role runs on: a name under `tiers`, or else the Ray custom "
        "resource that marks its nodes. Unset: any node.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM engine arguments for this role; they override those of `engine`.",
    )
    env: dict[Annotated[str, Field(pattern=VARIABLE)], str] = Field(
        default_factory=dict, description="Environment variables for this role's engines."
    )

    @property
    def most_replicas(self) -> int:
        """How many engines this role may have at a time."""
        return self.max_replicas or self.replicas


class TierSettings(Strict):
    """Nodes of one kind, told by what Ray can see of them, and how their GPUs are run."""

    accelerator_type: str | None = Field(
        default=None,
        pattern=NAME,
        description="The tier's nodes have this accelerator type, by Ray's name (`A40`, `H100`).",
    )
    resource: str | None = Field(
        default=None, pattern=NAME, description="The tier's nodes offer this Ray custom resource."
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="The tier's nodes have these Ray labels."
    )
    power_cap: float | str | None = Field(
        default=None,
        json_schema_extra={
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^[0-9.]+%?$"},
                {"type": "null"},
            ]
        },
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

    @field_validator("power_cap", mode="before")
    @classmethod
    def _watts_or_share(cls, value: Any) -> float | str | None:
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


class DiskSettings(Strict):
    """A disk below host memory: what comes there is written to it, and is found after restarts."""

    path: str | None = Field(
        default=None,
        description="Folder on each node's own disk, for KV that outlives engines, servers and the "
        "machine (docs/guides/disk.md). Not encrypted, and can be read back to text. Unset: none.",
    )
    size_gb: float = Field(
        default=100.0,
        gt=0,
        description="Most GiB of files; those unused for longest are removed before others are "
        "written.",
    )
    written_gb_per_day: float | None = Field(
        default=None,
        ge=0,
        description="Most GiB written in a day, which wear the disk; 0: any number. Unset: "
        "`size_gb`, since data-centre SSDs are made to be written once a day.",
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("give the folder's whole path, from / on; it is used on each node")
        return value

    @property
    def adapter(self) -> dict[str, int | str] | None:
        """Parameters of the LMCache server's adapter; None: there is no disk."""
        day_gb = self.size_gb if self.written_gb_per_day is None else self.written_gb_per_day
        sizes = {"bytes": round(self.size_gb * 2**30), "bytes_a_day": round(day_gb * 2**30)}
        return None if self.path is None else {"path": self.path, **sizes}


class LMCacheSettings(Strict):
    """The LMCache server, one a node, through which KV moves from prefiller to decoder."""

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
    disk: DiskSettings = Field(
        default_factory=DiskSettings,
        description="A disk below host memory. Not with `pausing: off`.",
    )

    @field_validator("port")
    @classmethod
    def _not_privileged(cls, value: int) -> int:
        if 0 < value < 1024:
            raise ValueError("give a port from 1024 on, or 0 for one that is free")
        return value

    @property
    def http_port(self) -> int:
        """Port of the server's admin interface and metrics, on loopback. 0: a free one."""
        return self.port and self.port + 1


class AutoscalingSettings(Strict):
    """When a role with `max_replicas` gets more or fewer engines."""

    window_s: float = Field(
        default=30.0, gt=0, description="Rates of arrival are averaged over this much time."
    )


class LimitSettings(Strict):
    """Bounds what an environment may use; no client may ask for more."""

    wall_s: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="How long a command may take, in seconds; each of its processes may have half "
        "of that of CPU time.",
    )
    memory_bytes: int = Field(
        default=2**30,
        ge=2**24,
        description="Memory of a command's processes, each and together; looked at ten times a "
        "second.",
    )
    processes: int = Field(
        default=64, ge=1, le=4096, description="Processes and threads of an environment."
    )
    disk_bytes: int = Field(
        default=2**28,
        ge=2**12,
        description="What an environment's files may take, one or all of them; looked at every "
        "second of a command, which is ended where it is more.",
    )


class MediaSettings(Strict):
    """Limits of a request's images, audio and video, and memory for encoding them."""

    parts: int = Field(default=32, ge=0, description="Most parts with media in a request.")
    bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=0,
        description="Most bytes of a request's media together, which `max_body_bytes` does not "
        "count.",
    )
    pixels: int = Field(
        default=16_000_000,
        ge=1,
        description="Most pixels of an image, read from its header before it is decoded.",
    )
    encoded_gb: float = Field(
        default=1.0,
        ge=0,
        description="Most host memory of a node in which its engines keep what they have encoded "
        "of images, so that each is encoded once there. 0: each engine encodes for itself.",
    )
    tower_layers: int | None = Field(
        default=None,
        ge=1,
        description="How many layers of the model's vision tower stay on an engine's GPU. The "
        "others are copied in from pinned host memory as it encodes, and KV gets the rest of their "
        "memory; with 2 (the paper's number) copies and computation overlap. Encoders keep all, as "
        "every engine does where it is unset.",
    )


class TLSSettings(Strict):
    """The router's certificate. With one it listens by TLS, and by nothing else."""

    cert_file: str | None = Field(
        default=None,
        min_length=1,
        description="File of the router's certificate and its chain, in PEM, on the router's node: "
        "the router then listens by TLS alone. Read again when it changes. Unset: plain HTTP.",
    )
    key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File of the certificate's private key, in PEM and without a passphrase. Read "
        "again when it changes.",
    )

    _whole_path = field_validator("cert_file", "key_file", mode="after")(absolute)

    @property
    def files(self) -> tuple[str, str] | None:
        """The certificate's file and its key's; None: there is no TLS."""
        if self.cert_file is None or self.key_file is None:
            return None
        return self.cert_file, self.key_file


class LogSettings(Strict):
    """The log of turns and events."""

    format: Literal["text", "json"] = Field(
        default="text",
        description="How `conserve.log`, with a line for each turn and event, and the routers' and "
        "engines' logs are written: for people, or a JSON object a line.",
    )


class TracingSettings(Strict):
    """Traces of turns, for an OpenTelemetry collector."""

    endpoint: str | None = Field(
        default=None,
        min_length=1,
        description="URL of an OpenTelemetry collector that takes OTLP by HTTP, such as "
        "`http://127.0.0.1:4318`: each turn becomes a trace there. Unset: none does.",
    )

    @field_validator("endpoint", mode="after")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError("give a URL such as http://127.0.0.1:4318")
        if parts.username or parts.password:
            raise ValueError(
                "settings are no secret: give what the collector asks for in "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )
        return value.rstrip("/")

    @property
    def url(self) -> str | None:
        """The address that spans are sent to."""
        if self.endpoint is None or self.endpoint.endswith("/v1/traces"):
            return self.endpoint
        return self.endpoint + "/v1/traces"


class EnvironmentSettings(Strict):
    """Whether clients may have environments in which their agents' tools run, and how many."""

    enabled: bool = Field(
        default=False,
        description="Whether clients may run commands on the head node, each in an environment of "
        "its conversation's.",
    )
    root: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of environments' files, on the head node; the application's alone. "
        f"Unset: `{ENVIRONMENTS_ROOT}-UID/PORT`.",
    )
    isolation: Literal["namespaces", "limits"] = Field(
        default="namespaces",
        description="What a process environment must have at least: Linux namespaces, where it "
        "sees no other process, no network and no others' files, or nothing but limits, which "
        "stop accidents and no attacker.",
    )
    network: bool = Field(
        default=False,
        description="Whether commands may use the machine's network, its loopback included.",
    )
    limits: LimitSettings = Field(
        default_factory=LimitSettings,
        description="What an environment may use; a client may ask for less.",
    )
    most: int = Field(
        default=256,
        ge=1,
        le=4096,
        description="How many environments there may be at a time; where there are keys, one "
        "tenant may have a quarter of them.",
    )

    _whole_path = field_validator("root", mode="after")(absolute)
