"""Has a process join a Ray at the address where it listens, and with its token."""

import os

from deployments.ray_token import NO_TOKEN, answer
from deployments.upstream.outer_address import find_on_loopback
from deployments.upstream.seams import require_seams


def find_ray(address: str) -> None:
    """Have this process join a Ray, with its token, and on loopback if it listens only there.

    Args:
        address: as for ``ray.init``, such as ``auto``.

    Raises:
        ConnectionError: it asks for a token that this process does not have.
    """
    found = find_on_loopback(address)
    if found is not None:
        _use_token(found)


def _use_token(address: str) -> None:
    """Have this process send its token to the Ray there if that Ray asks for one.

    A Ray that asks for none would end the actors of a process with one: it cannot call it back.
    """
    require_seams("ray_token")
    from ray._raylet import AuthenticationTokenLoader, Config

    asked = answer(address)
    if "RAY_AUTH_MODE" not in os.environ and asked in ("OK", NO_TOKEN):
        os.environ["RAY_AUTH_MODE"] = "token" if asked == NO_TOKEN else "disabled"
        Config.initialize("")
    if asked == NO_TOKEN:
        tokens = AuthenticationTokenLoader.instance()
        found = tokens.has_token(ignore_auth_mode=True)
        if not found or answer(address, tokens.get_token_for_http_header()) == NO_TOKEN:
            raise ConnectionError(
                "it asks for a token, and this process has none that it takes: run as the user "
                "who started it, or copy that user's ~/.ray/auth_token, and set RAY_AUTH_MODE=token"
            )
