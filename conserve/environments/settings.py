"""Settings of tool environments; a block of `conserve.settings`."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from conserve.environments.spec import MOST_PORTS, Limits

_ROOT = "/var/tmp/conserve-environments"
_LAST_PORT = 65_535


class EnvironmentSettings(BaseModel):
    """Whether clients may have environments in which their agents' tools run, and how many."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    enabled: bool = Field(
        default=False,
        description="Whether clients may run commands on the head node, each in an environment of "
        "its conversation's.",
    )
    root: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of environments' files, on the head node; the application's alone. "
        f"Unset: `{_ROOT}-UID/PORT`.",
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
    container_engine: str | None = Field(
        default=None,
        min_length=1,
        description="Program that runs containers, as Docker's command does. Unset: `docker`, or "
        "else `podman`, where one answers.",
    )
    limits: Limits = Field(
        default_factory=Limits,
        description="What an environment may use; a client may ask for less.",
    )
    most: int = Field(
        default=256, ge=1, le=4096, description="How many environments there may be at a time."
    )
    most_of_tenant: int = Field(
        default=64, ge=1, description="How many of them one tenant may have, where there are keys."
    )
    disk_bytes: int = Field(
        default=2**36,
        ge=2**12,
        description="What all environments' `limits.disk_bytes` may add up to.",
    )
    first_port: int = Field(
        default=28_000,
        ge=1024,
        le=_LAST_PORT,
        description=f"Environments get ports from this one on, out of {MOST_PORTS} each.",
    )
    preparing: int = Field(
        default=4, ge=1, le=64, description="How many environments are prepared at a time."
    )
    running: int = Field(
        default=32, ge=1, le=1024, description="How many commands run at a time; others wait."
    )
    waiting: int = Field(
        default=256, ge=0, description="How many commands may wait; one more is refused with 429."
    )
    near: int = Field(
        default=4,
        ge=0,
        description="An environment is prepared when its conversation is bound, or has one of the "
        "first places, this many, in the queue.",
    )
    unclaimed_s: float = Field(
        default=120.0,
        gt=0,
        description="An environment whose conversation has not begun after this time is removed.",
    )

    @field_validator("root", mode="after")
    @classmethod
    def _whole_path(cls, value: str | None) -> str | None:
        # The manager's process has a working directory of its own.
        return None if value is None else os.path.abspath(os.path.expanduser(value))

    @model_validator(mode="after")
    def _ports_are_there(self) -> Self:
        last = self.first_port + self.most * MOST_PORTS - 1
        if last > _LAST_PORT:
            raise ValueError(f"first_port: the last one would be {last}; lower it, or most")
        return self

    def folder(self, port: int) -> Path:
        """Return the folder of the application with this router's port."""
        return Path(self.root or f"{_ROOT}-{os.getuid()}/{port}")
