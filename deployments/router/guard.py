"""Which requests a router hears at all: none that a web page of somebody else's could send.

A browser sends a form or a text to any address, loopback included, without asking; what it may not
send unasked is JSON. And a name of the page's own may come to stand for 127.0.0.1 (DNS rebinding):
then the browser holds the router for the page's own server, but it sends that name.
"""

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from conserve.errors import ApiError
from conserve.loopback import is_loopback
from deployments.router.responses import error_response

_JSON = re.compile(
    r"\s*application/(?:json|[\w.!#$&^+-]+\+json)\s*(?:;|$)", re.IGNORECASE | re.ASCII
)


class Guard:
    """ASGI middleware that refuses what is not JSON and, on loopback, who comes by another name.

    Args:
        host: the address that the router listens on; where it is not loopback, names are not
            checked.
        allowed_hosts: names that are as good as loopback's, of a proxy on this machine.
    """

    def __init__(self, app: ASGIApp, host: str, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._checks_names = is_loopback(host)
        self._allowed = {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(scope, Headers(scope=scope))
            if error is not None:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if not scope["path"].isprintable():
            # Starlette takes a path with a line break at its end for the one without.
            return ApiError(404, "no such path: it holds a character that cannot be seen")
        if self._checks_names:
            # HTTP/1.0 may come without a Host; browsers never do.
            for host in headers.getlist("host"):
                if not self._is_ours(f"//{host}"):
                    return ApiError(
                        421,
                        f"this router listens on loopback and does not go by the name "
                        f"{host[:100]!r}; ask for 127.0.0.1 or localhost, or have the setting "
                        "allowed_hosts name it",
                        "wrong_host",
                    )
            for origin in headers.getlist("origin"):
                if not self._is_ours(origin):
                    return ApiError(
                        403,
                        f"web pages of {origin[:100]!r} may not use this router, which listens on "
                        "loopback; the setting allowed_hosts can let them",
                        "wrong_origin",
                    )
        if scope["method"] == "POST" and not _JSON.match(headers.get("content-type", "")):
            return ApiError(
                415,
                "the body must be JSON, and say so: send it with `Content-Type: application/json`",
                "unsupported_media_type",
            )
        return None

    def _is_ours(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            name = parts.hostname
        except ValueError:
            return False
        if name is None or parts.username is not None:
            return False
        return is_loopback(name.removesuffix(".")) or name in self._allowed
