"""A router's listening socket, which its successor takes over: no connection is refused or reset.

A kernel resets what is in the accept queue of a socket that closes, also where several sockets
share the port. So a router that starts asks those that run for theirs, and both accept from it
until the older one ends. They find each other by names in Linux's abstract namespace, which belong
to a network namespace as ports do.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import struct
import uuid
from pathlib import Path
from typing import Self

from deployments.event_loop import in_background
from deployments.node.lmcache_server import refused

logger = logging.getLogger("ray.serve")

_PATIENCE_S = 2.0
_LONGEST = 32
_NO, _YES = b"no", b"yes"
_CREDENTIALS = struct.Struct("3i")


class Listener:
    """A listening socket, from an earlier router or new, and its way to the next one.

    A router gives its socket to one router of another deployment, or to any once it is told to end
    (`ending`). No other application takes it. `taken` is whether another router that lives accepts
    from it, too.
    """

    def __init__(self, application: str, host: str, port: int, deployment: str) -> None:
        group = hashlib.sha256(f"{application} {host} {port}".encode()).hexdigest()[:16]
        self._deployment = deployment.encode()
        self.taken = False
        self.ending = False
        # Open for as long as this router lives, which is how the earlier one knows.
        self._earlier: socket.socket | None = None
        beginning = f"conserve-router:{group}:"
        self._others = _names(beginning)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(f"\0{beginning}{uuid.uuid4().hex[:16]}")
        self._at = host, port
        self.socket: socket.socket | None = None

    @property
    def has_others(self) -> bool:
        """Return whether other routers had the port when this one started."""
        return bool(self._others)

    def take(self) -> socket.socket:
        """Return the socket: another router's, or a new one."""
        self.socket = self._inherited() or _bound(*self._at, alone=not self._others)
        return self.socket

    def offer(self) -> Self:
        """Offer the socket to routers that start later, now that this one accepts from it."""
        self._door.setblocking(False)
        self._door.listen(8)
        in_background(self._keep_giving())
        return self

    def close(self) -> None:
        """Close what this process has of the socket, which others may have too."""
        for one in (self._earlier, self._door, self.socket):
            if one is not None:
                one.close()

    def _inherited(self) -> socket.socket | None:
        for name in self._others:
            asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            asking.settimeout(_PATIENCE_S)
            handles: list[int] = []
            with contextlib.suppress(OSError):
                asking.connect(f"\0{name}")
                if _is_own(asking):
                    asking.send(self._deployment)
                    _, handles, _, _ = socket.recv_fds(asking, _LONGEST, 1)
            if handles:
                self._earlier = asking
                return socket.socket(fileno=handles[0])
            asking.close()
        return None

    async def _keep_giving(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asking, _ = await loop.sock_accept(self._door)
            in_background(self._give(asking))

    async def _give(self, asking: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with asking, contextlib.suppress(OSError, TimeoutError):
            if not _is_own(asking):
                return
            deployment = await asyncio.wait_for(loop.sock_recv(asking, _LONGEST), _PATIENCE_S)
            if self.taken or (deployment == self._deployment and not self.ending):
                asking.send(_NO)
                return
            assert self.socket is not None
            socket.send_fds(asking, [_YES], [self.socket.fileno()])
            self.taken = True
            logger.info("router %d: another router accepts from its port, too", os.getpid())
            try:
                # It says nothing more: this ends with it.
                await loop.sock_recv(asking, 1)
            finally:
                self.taken = False


def _names(beginning: str) -> list[str]:
    """Return the names of that beginning in the abstract namespace of this network namespace."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return []
    names = {line.split()[-1].removeprefix("@") for line in lines if f" @{beginning}" in line}
    return sorted(names)


def _is_own(connection: socket.socket) -> bool:
    """Return whether the other end is a process of this user; others may bind any name."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.getuid())


def _bound(host: str, port: int, alone: bool) -> socket.socket:
    """Return a new socket; if ``alone``, no other router of the application may have the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # It is tried without SO_REUSEPORT, which would share it with any process of this user.
        if alone and (why := refused(host, port)) is not None:
            raise OSError(why, os.strerror(why))
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Routers share the port of a node; the kernel spreads connections over their sockets.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        raise RuntimeError(
            f"cannot listen on {host}:{port}: {error.strerror}. Set another "
            "`port`; if Serve's own proxy has it, set `proxy_location: Disabled`."
        ) from None
    return listener
