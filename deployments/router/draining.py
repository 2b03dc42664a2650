"""Ends a router without an effect on its clients.

Serve ends a replica when another deployment replaces it, when its application is deleted, and when
it is not healthy. A signal to its process makes it unhealthy, so that Serve starts another one.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

import uvicorn
from ray import serve

from deployments.router.frontdoor import FrontDoor
from deployments.router.listener import Listener

logger = logging.getLogger("ray.serve")

# Clients may reuse a connection for so long after an answer; then uvicorn closes it.
KEEP_ALIVE_S = 75
_LOOK_S = 0.5
_STATUS_S = 5.0


class Drain:
    """The end of a router: serves until another one has its socket, then what is connected to it.

    A client that keeps its connection gets ``Connection: close`` with its next answer. If the
    application ends, no other router comes: then new turns are refused, and running ones finish.

    Args:
        timeout_s: what runs after that is cut.
        is_deleted: whether the application is being deleted.
    """

    def __init__(
        self,
        door: FrontDoor,
        server: uvicorn.Server,
        listener: Listener,
        timeout_s: float,
        is_deleted: Callable[[], Awaitable[bool]],
    ) -> None:
        self._door = door
        self._server = server
        self._listener = listener
        self._timeout_s = timeout_s
        self._is_deleted = is_deleted

    def announce(self) -> None:
        """Have the router replaced; it serves as before until it is."""
        self._door.probes.drain()
        self._listener.ending = True

    async def run(self) -> None:
        """Return when nothing is served any more, or the time is up."""
        self.announce()
        deadline_s = time.monotonic() + self._timeout_s
        while not self._listener.taken and time.monotonic() < deadline_s:
            if await self._is_deleted():
                self._door.refusing = True
                break
            await asyncio.sleep(_LOOK_S)
        if not self._door.refusing:
            # The socket itself stays open, and connections that wait in it go to the other router.
            for listening in self._server.servers:
                listening.close()
        idle_s = min(deadline_s, time.monotonic() + KEEP_ALIVE_S)
        state = self._server.server_state
        while time.monotonic() < deadline_s:
            done = self._door.refusing or time.monotonic() >= idle_s
            if not (state.tasks if done else state.connections):
                break
            await asyncio.sleep(_LOOK_S / 5)
        if state.tasks:
            logger.warning("router %d ends with %d requests", os.getpid(), len(state.tasks))
        self._server.should_exit = True


async def is_deleted(application: str) -> bool:
    """Return whether Serve is deleting the application; False if that cannot be found out."""

    def look() -> bool:
        found = serve.status().applications.get(application)
        return found is None or found.status == "DELETING"

    try:
        return await asyncio.wait_for(asyncio.to_thread(look), _STATUS_S)
    except Exception as error:
        logger.warning("Serve's controller does not say whether the application ends: %s", error)
        return False
