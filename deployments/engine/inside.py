"""The seat of the add-on `conserve_inside`: what runs inside vLLM beyond what a turn needs.

All engines of an application ask for it where `Settings.runs_inside` names a setting.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from conserve.addons import INSIDE, addon, missing
from conserve.direct import Notice
from conserve.settings import Settings, SettingsError
from conserve.wire import Role
from deployments.messages import Heard, SchedulerLoad
from hetero.sm_slots import SmLease
from hetero.tiers import RoleTier

if TYPE_CHECKING:  # What builds an application loads neither.
    from fastapi import FastAPI

    from deployments.node.node import NodeClient

# Waits for a call that frees something, and logs it: its name, the call, and after how many seconds
# it is free when the engine is missed.
GiveBack = Callable[[str, Awaitable[None], float], Awaitable[None]]


class Inside:
    """An add-on's part in the engines of one role; this one does nothing.

    The first two methods are called where the application is built, the others by each engine, in
    this order.
    """

    # --- As the application is built --------------------------------------------------------------

    def arguments(self, engine: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
        """Return engine arguments over ``engine``, which has all others."""
        return {}

    def environment(self) -> dict[str, str]:
        """Return variables for engines; those of an operator go over them."""
        return {}

    # --- As an engine starts ----------------------------------------------------------------------

    def require(self) -> None:
        """Raise `PatchError` if vLLM here is not as the add-on needs it."""

    def configured(
        self, engine: Mapping[str, Any], engine_id: str, node: "NodeClient"
    ) -> dict[str, Any]:
        """Return engine arguments over ``engine``, now that its node is known.

        Raises `SettingsError` if the model is not of the kind that a setting needs.
        """
        return {}

    async def started(
        self, client: Any, call_workers: Callable[[str], Awaitable[list[Any]]]
    ) -> tuple[SmLease, ...]:
        """Connect to an engine that has loaded; return the SMs that it has leased."""
        return ()

    def add_routes(self, app: "FastAPI") -> None:
        """Add paths to the engine's own HTTP server."""

    # --- As it serves -----------------------------------------------------------------------------

    def load(self) -> SchedulerLoad | None:
        """Return what the table is told with the next beat."""
        return None

    def hear(self, notice: Notice) -> None:
        """Act on what the table tells beside a report."""

    def heard(self, heard: Heard) -> None:
        """Act on the table's answer to a beat."""

    async def ended(self, give_back: GiveBack) -> None:
        """Give back what is not the engine process's own."""


class InsideAddon(Protocol):
    """The object that `conserve_inside` offers."""

    def __call__(self, role: Role, settings: Settings, tier: RoleTier) -> Inside: ...


def inside_of(role: Role, settings: Settings, tier: RoleTier) -> Inside:
    """Return what runs inside a role's engines; raises `SettingsError` without the add-on."""
    if not settings.runs_inside:
        return Inside()
    found: InsideAddon | None = addon(INSIDE)
    if found is None:
        raise SettingsError(*(missing(what, INSIDE) for what in settings.runs_inside))
    return found(role, settings, tier)
