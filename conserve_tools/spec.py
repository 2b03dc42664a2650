"""Validates a client's request for an environment, or for a command there."""

import math
import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from conserve.settings import EnvironmentSettings, LimitSettings

MOST_PORTS = 8
MOST_COMMAND_CHARS = 64 * 1024
MOST_ARGUMENTS = 256
MOST_STDIN_CHARS = 1024 * 1024
# An image's name, with its registry, tag and digest.
_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,255}$"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

# Limits that follow from the setting of another one.
_FOLLOWING = {"cpu_s": "wall_s", "file_bytes": "disk_bytes"}

_Model = TypeVar("_Model", bound=BaseModel)

Name = Annotated[str, StringConstraints(pattern=rf"^{_NAME.pattern}$")]
Command = Annotated[str, StringConstraints(min_length=1, max_length=MOST_COMMAND_CHARS)]


class SpecError(ValueError):
    """Refuses a request; the message names the field and says what is wrong.

    ``field`` is None if the request is no object.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(_Strict):
    """Bounds what an environment may use; of the application, the most that clients may ask for.

    docs/guides/environments.md says how each is enforced. ``output_bytes`` is for each of two
    outputs.
    """

    cpu_s: int = 60
    wall_s: float = 120.0
    memory_bytes: int = 2**30
    processes: int = 64
    file_bytes: int = 2**28
    disk_bytes: int = 2**28
    open_files: int = 256
    output_bytes: int = 2**16

    @classmethod
    def of(cls, settings: EnvironmentSettings) -> Self:
        """Return an application's limits: those in its settings, and what follows from them."""
        given = settings.limits
        return cls(
            # A command with one thread that computes takes as much as it waits for the rest.
            cpu_s=max(1, math.ceil(given.wall_s / 2)),
            file_bytes=given.disk_bytes,
            **given.model_dump(),
        )


class LimitsAsked(_Strict):
    """The limits that a client wants below the application's; None: the application's."""

    cpu_s: int | None = Field(default=None, ge=1)
    wall_s: float | None = Field(default=None, gt=0)
    memory_bytes: int | None = Field(default=None, ge=2**24)
    processes: int | None = Field(default=None, ge=1)
    file_bytes: int | None = Field(default=None, ge=0)
    disk_bytes: int | None = Field(default=None, ge=2**12)
    open_files: int | None = Field(default=None, ge=16)
    output_bytes: int | None = Field(default=None, ge=1)


class Spec(_Strict):
    """An environment, as a client asks for it.

    Attributes:
        kind: ``process`` runs in a sandbox on the head node, ``container`` from an image.
        ports: how many TCP ports are reserved for it.
        setup: a shell command that is run once, before anything else.
        shared: whether all conversations of the tenant that ask for this name have the same one.
    """

    name: Name = "main"
    kind: Literal["process", "container"] = "process"
    image: Annotated[str, StringConstraints(pattern=_IMAGE)] | None = None
    limits: Limits = Limits()
    ports: int = Field(default=0, ge=0, le=MOST_PORTS)
    setup: Command | None = None
    shared: bool = False

    @model_validator(mode="after")
    def _container_has_an_image(self) -> Self:
        if (self.kind == "container") != (self.image is not None):
            raise ValueError("a container has an image, and a process has none")
        return self

    @classmethod
    def asked(cls, body: Any, most: Limits) -> Self:
        """Read a request for an environment, within the application's limits.

        Raises:
            SpecError: it cannot be had.
        """
        if not isinstance(body, dict):
            raise SpecError("the body must be a JSON object")
        own = _validated(LimitsAsked, body.get("limits") or {}, "limits.")
        wanted = own.model_dump(exclude_none=True)
        for name, value in wanted.items():
            if value > getattr(most, name):
                setting = _FOLLOWING.get(name, name)
                is_set = setting in LimitSettings.model_fields
                why = f", by the setting environments.limits.{setting}" if is_set else ""
                raise SpecError(
                    f"limits.{name}: at most {getattr(most, name)} here{why}", f"limits.{name}"
                )
        limits = most.model_copy(update=wanted)
        return _validated(cls, {**body, "limits": limits}, "")


class Run(_Strict):
    """A command to run in an environment.

    Attributes:
        command: of a shell, or a program with its arguments.
        timeout_s: None means the environment's limit.
        tool: the agent's name for it, for `/v1/events`.
        call_id: names this call: asked for twice, it is run once.
    """

    command: Command | Annotated[list[Command], Field(min_length=1, max_length=MOST_ARGUMENTS)]
    stdin: Annotated[str, StringConstraints(max_length=MOST_STDIN_CHARS)] = ""
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    tool: Annotated[str, StringConstraints(max_length=64)] = "run"
    call_id: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None

    @classmethod
    def asked(cls, body: Any) -> Self:
        """Read a request for a command.

        Raises:
            SpecError: it cannot be run.
        """
        if not isinstance(body, dict):
            raise SpecError("the body must be a JSON object")
        run = _validated(cls, body, "")
        if any("\0" in word for word in run.arguments):
            raise SpecError("command: it holds a null character", "command")
        return run

    @property
    def arguments(self) -> list[str]:
        return ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else self.command


def _validated(model: type[_Model], value: Any, prefix: str) -> _Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = [str(part) for part in first["loc"]]
        # A command of neither kind has two errors, of which the first says enough.
        field = prefix + (where[0] if where else "")
        if first["type"] == "extra_forbidden":
            there = ", ".join(model.model_fields)
            raise SpecError(f"{field}: there is no such field; there are {there}", field) from None
        said = first["msg"].removeprefix("Value error, ")
        raise SpecError(f"{field}: {said}" if field else said, field or None) from None
