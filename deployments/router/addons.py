"""The seat of the add-on `conserve_tools` in a router: paths, their description, and a beat."""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conserve.addons import TOOLS, addon, missing
from conserve.errors import ApiError
from conserve.settings import Settings

_PATH = "/v1/conversations/{id:path}/environments"


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


class RouterAddon(Protocol):
    """An add-on with paths of its own."""

    def described(self) -> Described: ...

    def router_part(self, application: str, deployment: str, settings: Settings) -> RouterPart:
        """Return its part of a router of this application and deployment."""


def described() -> list[Described]:
    found: RouterAddon | None = addon(TOOLS)
    return [] if found is None else [found.described()]


def parts(application: str, deployment: str, settings: Settings) -> list[RouterPart]:
    """Return the add-on's part of a router; where it is not installed, a part that says so."""
    found: RouterAddon | None = addon(TOOLS)
    return [Absent() if found is None else found.router_part(application, deployment, settings)]


class Absent:
    """Refuses the paths of an add-on that is not installed."""

    def routes(self) -> list[Route]:
        return [
            Route(_PATH, self._refuse, methods=["GET", "POST"]),
            Route(_PATH + "/{env}", self._refuse, methods=["GET", "DELETE"]),
            Route(_PATH + "/{env}/run", self._refuse, methods=["POST"]),
        ]

    def beat(self) -> None: ...

    async def _refuse(self, request: Request) -> Response:
        what = missing("an environment for tools", TOOLS)
        raise ApiError(404, what, "environments_disabled", final=True)
