"""Has a process join a Ray at the address where it listens, and with its token.

A Ray that asks for a token answers only clients that have it (docs/security.md).
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
    """Have a token, in a file for this user alone, for the Ray that this process starts next.

    Ray 2.60 would make it for all users to read. What the environment says of it is left alone.
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
    """Have the token, if Ray or `keep_token` has made one, be for this user alone to read."""
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
    """Have this process join a Ray, on loopback if it listens only there.

    It sends its token if that Ray asks for one. A Ray that asks for none would end the actors of a
    process with one: it cannot call it back.

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
