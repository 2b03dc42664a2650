"""Whether a command is for a Ray cluster, and whether there is one."""

import os
import socket

from deployments.joining import answer

_NOT_RAY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNIMPLEMENTED")
_ANSWERS_WITHIN_S = 3.0


def require_ray(address: str) -> None:
    """Raise `ConnectionError` within seconds if no Ray answers there; Ray would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ConnectionError("give HOST:PORT of its head (Ray's own port is 6379), or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN_S).close()
    except OSError as error:
        said = error.strerror or "it does not answer"
        raise ConnectionError(f"nothing listens there ({said})") from None
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    # A Ray that wants a token answers with another code.
    if answer(address) in _NOT_RAY:
        raise ConnectionError("what listens there is not a Ray cluster's head")


def is_alone() -> bool:
    """Return whether a start would have a Ray of its own, on this machine."""
    return not os.environ.get("RAY_ADDRESS")
