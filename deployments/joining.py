"""Connects this process to a Ray cluster, with its token and at the address where it listens.

A Ray that asks for a token answers only clients that have it (docs/reference/security.md).
"""

import logging
import os
import secrets
from pathlib import Path

from deployments.upstream.outer_address import find_on_loopback
from deployments.upstream.seams import require_seams

logger = logging.getLogger("ray.serve")

# A call of Ray 2.60's that changes nothing.
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
NO_TOKEN = "UNAUTHENTICATED"
_FILE = "~/.ray/auth_token"


def keep_token() -> None:
    """Write a token for the Ray that this process starts next, in a file only this user can read.

    Ray 2.60 would let all users read it. A token or mode set in the environment is left alone.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token" or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    file = Path(os.path.expanduser(_FILE))
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.touch(0o600)
    close_token()
    if not file.stat().st_size:
        file.write_text(secrets.token_hex(32))


def close_token() -> None:
    """Restrict the token file, if there is one, to this user."""
    file = Path(os.path.expanduser(_FILE))
    if file.exists() and file.stat().st_uid == os.getuid():
        file.parent.chmod(0o700)
        if file.stat().st_mode & 0o077:
            file.chmod(0o600)
            logger.warning("%s was open to other users: replace it if one may have read it", file)


def answer(address: str, headers: dict[str, str] | None = None) -> str:
    """Return the gRPC status that the head of a Ray answers with; ``OK``: it asks for no token."""
    import grpc

    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_ALIVE)(b"", timeout=3, metadata=tuple((headers or {}).items()))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def find_ray(address: str) -> None:
    """Prepare this process to join a Ray, on loopback if that Ray listens only there.

    The token is sent only if that Ray asks for one: a Ray without tokens cannot call back a process
    that has one, and ends its actors.

    Args:
        address: as for ``ray.init``, such as ``auto``.

    Raises:
        ConnectionError: it asks for a token that this process does not have.
    """
    found = find_on_loopback(address)
    if found is None:
        return
    require_seams("ray_token")
    from ray._raylet import AuthenticationTokenLoader, Config

    asked = answer(found)
    if "RAY_AUTH_MODE" not in os.environ and asked in ("OK", NO_TOKEN):
        os.environ["RAY_AUTH_MODE"] = "token" if asked == NO_TOKEN else "disabled"
        Config.initialize("")
    if asked == NO_TOKEN:
        tokens = AuthenticationTokenLoader.instance()
        has_one = tokens.has_token(ignore_auth_mode=True)
        if not has_one or answer(found, tokens.get_token_for_http_header()) == NO_TOKEN:
            raise ConnectionError(
                "it asks for a token, and this process has none that it takes: run as the user "
                "who started it, or copy that user's ~/.ray/auth_token, and set RAY_AUTH_MODE=token"
            )
