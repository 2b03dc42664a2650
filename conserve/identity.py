"""Who is speaking: the conversation id that a request states, in its headers or its body.

Agents and routers name the same thing differently; the two tables below list every name that is
understood, in order of precedence. A request without any of them is recognised by its messages
instead (see ``conserve.recognition``).
"""

import re
import secrets
import unicodedata
from collections.abc import Mapping
from typing import Any

# In order: the first that is present and not empty is the id. Headers come before body fields
# because a proxy can set them without touching the body.
HEADERS = (
    "X-Conversation-Id",
    "x-session-id",
    "session-id",
    "X-Dynamo-Session-ID",
    "x-claude-code-session-id",
    "X-SMG-Routing-Key",
)
BODY_FIELDS = ("conversation_id", "program_id", "session_id", "job_id")

FINAL_HEADER = "x-dynamo-session-final"

# Long enough for several UUIDs joined together, short enough for a header, a URL and a log line.
MAX_ID_CHARS = 256

_GENERATED = re.compile(r"conv-[0-9a-f]{24}")

# How much of a refused value an error message shows. It may be long, or a secret put in the
# wrong field.
_MAX_ECHO_CHARS = 40

# Between a tenant and its client's own id, in an id as ConServe keeps it. It is not printable, so
# no client's id holds it; and a header may.
_SCOPE = "\t"
# Between a conversation and the number of one of its histories, but for the first.
_FURTHER = "\t\t"

_HEADER_KEYS = tuple((name, name.lower()) for name in HEADERS)

_JSON_TYPES: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}


class InvalidConversationId(ValueError):
    """A stated conversation id that cannot be used; the message says why, for the client.

    ``source`` is the name of the header or body field that held it.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source} {problem}")
        self.source = source


def explicit_id(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The conversation id that a request states, or None.

    ``headers`` has lower-cased names. The first of ``HEADERS``, then of ``BODY_FIELDS``, that is
    present and not empty wins; those after it are not looked at. Surrounding white space is no
    part of an id. An id is at most ``MAX_ID_CHARS`` printable ASCII characters, and neither ``.``
    nor ``..``, so that it can stand in response headers, URLs (percent-encoded by the client where
    needed) and logs.

    Raises InvalidConversationId when the winning value breaks that rule or is not a string.
    """
    for source, key in _HEADER_KEYS:
        value = headers.get(key)
        if value is not None and (stripped := value.strip()):
            return _checked(source, stripped)
    for source in BODY_FIELDS:
        value = body.get(source)
        if value is None:  # clients write null for an option that is not set
            continue
        if not isinstance(value, str):
            kind = _JSON_TYPES.get(type(value), type(value).__name__)
            raise InvalidConversationId(
                source,
                f"must be a string of at most {MAX_ID_CHARS} characters, not {kind}; "
                "send it in quotes or leave it out",
            )
        if stripped := value.strip():
            return _checked(source, stripped)
    return None


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether the client says that this is the conversation's last turn.

    ``headers`` has lower-cased names.
    """
    return headers.get(FINAL_HEADER, "").strip().lower() == "true"


def without_identity(body: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``body`` without the fields that name a conversation.

    The engine does not know them, and an engine may refuse what it does not know.
    """
    return {name: value for name, value in body.items() if name not in BODY_FIELDS}


def new_id() -> str:
    """A fresh id, such as ``conv-0f3a...`` (24 hexadecimal digits)."""
    return f"conv-{secrets.token_hex(12)}"


def is_generated(conversation_id: str) -> bool:
    """Whether an id is one of `new_id`, whosever it is, and no client's own."""
    return _GENERATED.fullmatch(own_id(conversation_id)) is not None


def scoped(tenant: str | None, conversation_id: str) -> str:
    """A client's id as it is kept: of one tenant, and equal to no other tenant's.

    Args:
        tenant: None where there are no keys; the id is then kept as it is.
    """
    return conversation_id if tenant is None else f"{tenant}{_SCOPE}{conversation_id}"


def further(conversation_id: str, number: int) -> str:
    """The id of one more history of a conversation whose first has the conversation's own."""
    return f"{conversation_id}{_FURTHER}{number}"


def conversation_of(history_id: str) -> str:
    """The id, as it is kept, of the conversation that a history belongs to."""
    return history_id.partition(_FURTHER)[0]


def tenant_of(conversation_id: str) -> str | None:
    """The tenant of an id as it is kept, or of a history's; None if it has none."""
    tenant, scope, _ = conversation_of(conversation_id).partition(_SCOPE)
    return tenant if scope else None


def own_id(conversation_id: str) -> str:
    """An id, or that of a history's conversation, as its client knows it."""
    return conversation_of(conversation_id).rpartition(_SCOPE)[2]


def _checked(source: str, value: str) -> str:
    if len(value) > MAX_ID_CHARS:
        raise InvalidConversationId(
            source,
            f"has {len(value)} characters, the limit is {MAX_ID_CHARS}; "
            f"send a shorter id than {_shown(value)}",
        )
    if value in (".", ".."):
        raise InvalidConversationId(
            source,
            f'must not be "{value}": clients take it out of a URL, so the conversation could be '
            "neither looked at nor ended there",
        )
    if value.isascii() and value.isprintable():
        return value
    position, char = next(
        (i, c) for i, c in enumerate(value) if not (c.isascii() and c.isprintable())
    )
    invisible = unicodedata.category(char) in ("Cc", "Cf")
    raise InvalidConversationId(
        source,
        f"has the {'control' if invisible else 'non-ASCII'} character U+{ord(char):04X} at "
        f"position {position + 1} of {_shown(value)}; send at most {MAX_ID_CHARS} printable "
        "ASCII characters",
    )


def _shown(value: str) -> str:
    """The start of a refused value, quoted and escaped so that it is harmless in any log."""
    escaped = ascii(value[:_MAX_ECHO_CHARS])[1:-1]
    if len(value) <= _MAX_ECHO_CHARS and len(escaped) <= _MAX_ECHO_CHARS:
        return f'"{escaped}"'
    return f'"{escaped[:_MAX_ECHO_CHARS]}"...'
