"""The JSON that clients get of environments."""

from typing import Annotated, Literal

from msgspec import Meta

from conserve_tools.ledger import State
from deployments.answers import Answer, Count, Positive

Isolation = Literal["namespaces", "limits", "container"]


class EnvironmentLimits(Answer):
    """Bounds of an environment's use."""

    cpu_s: Count
    wall_s: Positive
    memory_bytes: Count
    processes: Count
    file_bytes: Count
    disk_bytes: Count
    open_files: Count
    output_bytes: Count


class Environment(Answer, tag_field="object", tag="environment"):
    """An environment for a conversation's tools."""

    id: str
    state: State
    kind: Literal["process", "container"]
    image: str | None
    isolation: Isolation | None
    ports: list[Count]
    shared: bool
    holders: Count
    limits: EnvironmentLimits
    error: str | None


class Environments(Answer, tag_field="object", tag="list"):
    data: list[Environment]


class EnvironmentRemoved(Answer, tag_field="object", tag="environment.deleted"):
    id: str
    deleted: Literal[True]


class CommandDone(Answer):
    """The outcome of a command."""

    exit_code: Annotated[Count, Meta(description="128 and its number if a signal ended it.")]
    stdout: str
    stderr: str
    truncated: Annotated[bool, Meta(description="Whether some of an output was dropped.")]
    timed_out: bool
    reason: Annotated[str | None, Meta(description="Why it was ended early; null: it was not.")]
    wall_s: Positive
    isolation: Isolation
