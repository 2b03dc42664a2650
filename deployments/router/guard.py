"""Refuses requests of foreign web pages, and by other servers' names, and answers CORS.

A browser sends a form or a text to any address, loopback included, without asking; it does not send
JSON unasked. A name of the page's own may also come to stand for 127.0.0.1 (DNS rebinding). Then
the browser takes the router for the page's own server, but sends that name. An address, or a name
that no public DNS server can answer for, cannot be rebound.

CORS (https://fetch.spec.whatwg.org/#http-cors-protocol) says what a page of another origin may send
and read. Starlette's middleware for it answers preflights of other origins itself, in plain text,
and sends some of its headers to pages that may not read the answer.
"""

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conserve.errors import ApiError
from conserve.loopback import address_of, is_loopback
from deployments.router.errors import RawHeaders, error_response

_JSON = re.compile(
    r"\s*application/(?:json|[\w.!#$&^+-]+\+json)\s*(?:;|$)", re.IGNORECASE | re.ASCII
)
# Names that distributions' /etc/hosts give to loopback. No public DNS has a name without a dot.
_LOOPBACK_NAMES = ("ip6-localhost", "ip6-loopback", "localhost4", "localhost6")
# Browsers take it for loopback (https://www.rfc-editor.org/rfc/rfc6761#section-6.3).
_LOOPBACK_DOMAIN = ".localhost"

_EXPOSED = (
    "X-Conversation-Id, X-Conserve-Decoder, X-Conserve-Unserved-Tools, X-Conserve-Ignored-Fields, "
    "X-Request-Id, Request-Id, Retry-After, X-Should-Retry"
)
_METHODS = "GET, POST, DELETE"
# Chrome keeps a preflight's answer for no longer.
_PREFLIGHT_S = 7200
_ASKED_HEADERS = "access-control-request-headers"
_ASKED_METHOD = "access-control-request-method"
_FOREIGN_PAGE = "conserve.foreign_page"


def is_here(scope: Scope) -> bool:
    """Return whether a request came from this machine, and not by a foreign page."""
    # Behind a proxy on this machine it is the proxy's client, by X-Forwarded-For: uvicorn puts it
    # there, for peers on loopback.
    peer = scope.get("client")
    # A foreign page comes from a browser on this machine, and would read the answer.
    return peer is not None and is_loopback(peer[0]) and _FOREIGN_PAGE not in scope


class Guard:
    """ASGI middleware that refuses bodies other than JSON and, on loopback, other servers' names.

    A page that may use the router gets CORS headers with each answer. Its preflights are answered
    here, since they come without a key.

    Args:
        host: the address that the router listens on; names are checked on loopback only.
        allowed_hosts: names that count as loopback's, of a proxy on this machine.
        keyed: whether requests need a key. Without keys, only pages of loopback and of
            `allowed_hosts` may read answers, wherever the router listens.
    """

    def __init__(
        self, app: ASGIApp, host: str, allowed_hosts: Collection[str] = (), keyed: bool = False
    ) -> None:
        self._app = app
        self._checks_names = is_loopback(host)
        self._allowed = {name.lower() for name in allowed_hosts}
        self._any_page = keyed and not self._checks_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            error = self._by_name(headers)
            if error is None:
                if not all(map(self._is_our_page, headers.getlist("origin"))):
                    scope[_FOREIGN_PAGE] = True
                origin = self._readable_by(headers)
                if origin is not None:
                    if scope["method"] == "OPTIONS" and _ASKED_METHOD in headers:
                        await _preflight(origin, headers)(scope, receive, send)
                        return
                    send = with_headers(_cors_headers(origin), send)
                error = _by_form(scope, headers)
            if error is not None:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _by_name(self, headers: Headers) -> ApiError | None:
        """Return the refusal of a request that names another server, or is a foreign page's."""
        if not self._checks_names:
            return None
        # HTTP/1.0 may come without a Host; browsers never do.
        for host in headers.getlist("host"):
            name = _name_in(f"//{host}")
            if name is None or not (address_of(name) or self._is_ours(name)):
                return ApiError(
                    421,
                    f"this router listens on loopback and does not go by the name "
                    f"{host[:100]!r}; ask for 127.0.0.1 or localhost, or have the setting "
                    "allowed_hosts name it",
                    "wrong_host",
                )
        for origin in headers.getlist("origin"):
            if not self._is_our_page(origin):
                return ApiError(
                    403,
                    f"web pages of {origin[:100]!r} may not use this router, which listens on "
                    "loopback; the setting allowed_hosts can let them",
                    "wrong_origin",
                )
        return None

    def _readable_by(self, headers: Headers) -> str | None:
        """Return the origin of the page that asks, if it may read the answer."""
        origins = headers.getlist("origin")
        if len(origins) != 1 or not (self._any_page or self._is_our_page(origins[0])):
            return None
        return origins[0]

    def _is_our_page(self, origin: str) -> bool:
        name = _name_in(origin)
        return name is not None and self._is_ours(name)

    def _is_ours(self, name: str) -> bool:
        address = address_of(name)
        return (
            is_loopback(name)
            # By 0.0.0.0 or `::` a client reaches its own machine.
            or (address is not None and address.is_unspecified)
            or name in _LOOPBACK_NAMES
            or name.endswith(_LOOPBACK_DOMAIN)
            or name in self._allowed
        )


def _by_form(scope: Scope, headers: Headers) -> ApiError | None:
    if not scope["path"].isprintable():
        # Starlette takes a path with a line break at its end for the one without.
        return ApiError(404, "no such path: it holds a character that cannot be seen")
    if scope["method"] == "POST" and not _JSON.match(headers.get("content-type", "")):
        return ApiError(
            415,
            "the body must be JSON, and say so: send it with `Content-Type: application/json`",
            "unsupported_media_type",
        )
    return None


def _name_in(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        name = parts.hostname
    except ValueError:
        return None
    return None if name is None or parts.username is not None else name.removesuffix(".")


def _preflight(origin: str, headers: Headers) -> Response:
    """Answer a browser that asks what a page of this origin may send."""
    allowed = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Max-Age": str(_PREFLIGHT_S),
    }
    if _ASKED_HEADERS in headers:
        # Conversations and hints have many headers, and `*` would not cover keys.
        allowed["Access-Control-Allow-Headers"] = headers[_ASKED_HEADERS]
    response = Response(status_code=204, headers=allowed)
    response.raw_headers += _cors_headers(origin)
    return response


def _cors_headers(origin: str) -> RawHeaders:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED.encode()),
        # So that no cache gives one origin's answer to another.
        (b"vary", b"Origin"),
    ]


def with_headers(more: RawHeaders, send: Send) -> Send:
    """Return a `send` that adds headers to an answer."""

    async def send_with_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return send_with_more
