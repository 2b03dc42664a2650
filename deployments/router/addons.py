"""The seat of the add-on `conserve_tools` in a router: paths, their description, and a beat."""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.routing import Route

from conserve.addons import TOOLS, addon
from conserve.settings import Settings


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
    found: RouterAddon | None = addon(TOOLS)
    return [] if found is None else [found.router_part(application, deployment, settings)]
