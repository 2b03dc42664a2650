"""The seat of add-ons in a router: paths, their description, and a beat.

An add-on of the entry-point group `conserve.addons` takes this seat if it is a `RouterAddon`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conserve.addons import TOOLS, addon, missing, offered
from conserve.errors import ApiError
from conserve.settings import Settings

# Paths of add-ons, with a name for what they have and the code of their refusal: a router without
# the add-on says which one has them.
_PATHS = {
    TOOLS: (
        "/v1/conversations/{id:path}/environments", "an environment for tools",
        "environments_disabled",
    ),
}  # fmt: skip


class RouterPart(Protocol):
    """An add-on's part of one router."""

    def routes(self) -> list[Route]:
        """Return the add-on's paths; those below a conversation's come before the core's."""

    def beat(self) -> None:
        """Keep alive what runs for routers, without waiting; called each second."""


@dataclass(frozen=True, slots=True)
class Described:
    """An add-on's paths in OpenAPI's words.

    Attributes:
        operations: a line for each, in the form of `deployments.router.interface`.
        answers: what the paths answer.
        bodies: schemas of requests' bodies, by name.
        parameters: schemas of what stands in paths, by name.
    """

    operations: str
    answers: tuple[type[msgspec.Struct], ...]
    bodies: dict[str, Any]
    parameters: dict[str, Any]


@runtime_checkable
class RouterAddon(Protocol):
    """An add-on with paths of its own."""

    def described(self) -> Described: ...

    def router_part(self, application: str, deployment: str, settings: Settings) -> RouterPart:
        """Return its part of a router of this application and deployment."""


def described() -> list[Described]:
    return [one.described() for one in _addons()]


def parts(application: str, deployment: str, settings: Settings) -> list[RouterPart]:
    """Return add-ons' parts of a router; for one that is not installed, a part that says so."""
    found: list[RouterPart] = [
        one.router_part(application, deployment, settings) for one in _addons()
    ]
    absent = (name for name in _PATHS if addon(name) is None)
    return found + [Absent(name) for name in absent]


def _addons() -> list[RouterAddon]:
    return [one for one in offered("conserve.addons").values() if isinstance(one, RouterAddon)]


class Absent:
    """Refuses the paths of an add-on that is not installed."""

    def __init__(self, name: str) -> None:
        self._path, what, code = _PATHS[name]
        self._refusal = ApiError(404, missing(what, name), code, final=True)

    def routes(self) -> list[Route]:
        methods = ["GET", "POST", "DELETE"]
        paths = (self._path, self._path + "/{rest:path}")
        return [Route(path, self._refuse, methods=methods) for path in paths]

    def beat(self) -> None: ...

    async def _refuse(self, request: Request) -> Response:
        raise self._refusal
