"""Names each request, by the client's `X-Request-Id` or by an id of ours.

Ids that clients choose may repeat, and tell requests apart for people alone.
"""

import secrets

from starlette.datastructures import Headers
from starlette.types import Scope

from conserve.apis import is_anthropic
from conserve.errors import REQUEST_ID
from deployments.router.errors import RawHeaders

HEADER = "x-request-id"
MOST_CHARS = 128
_ID = "conserve.request_id"


def request_id_of(scope: Scope) -> str:
    """Return a request's id: the client's if it can be shown as it is, or else one of ours."""
    if _ID not in scope:
        given = Headers(scope=scope).get(HEADER, "")
        usable = 0 < len(given) <= MOST_CHARS and given.isascii() and given.isprintable()
        scope[_ID] = given if usable else secrets.token_hex(16)
    id_: str = scope[_ID]
    return id_


def named(scope: Scope) -> RawHeaders:
    """Name a request, for errors too; return the headers of its answer."""
    id_ = request_id_of(scope)
    REQUEST_ID.set(id_)
    headers = [(HEADER.encode(), id_.encode())]
    if is_anthropic(scope["path"]):
        headers.append((b"request-id", id_.encode()))
    return headers
