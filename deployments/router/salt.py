"""Under which salt engines keep a prompt's KV: prompts with different salts never share any."""

import hashlib
import json
from typing import Any

_FIELD = "cache_salt"
# What LMCache 0.5.6 takes (`IPCCacheServerKey`); its connector fails the whole engine on any other,
# in the scheduler.
_LONGEST = 128
_UNFIT = frozenset("@/\\\0")


def own_media(messages: Any, salt: str) -> Any:
    """Messages in which no part goes by a name that another tenant could give.

    vLLM keeps what it has made of an image under the ``uuid`` of its part, whatever the salt: who
    names another's gets it to see, and who names one first has others see it.

    Returns:
        The same object, if no part has a name.
    """
    if not isinstance(messages, list):
        return messages
    changed = [_own_parts(message, salt) for message in messages]
    same = all(one is other for one, other in zip(changed, messages, strict=True))
    return messages if same else changed


def _own_parts(message: Any, salt: str) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    if not any(isinstance(part, dict) and part.get("uuid") is not None for part in content):
        return message
    return {**message, "content": [_own_part(part, salt) for part in content]}


def _own_part(part: Any, salt: str) -> Any:
    if not isinstance(part, dict) or part.get("uuid") is None:
        return part
    name = json.dumps([salt, part["uuid"]]).encode()
    return {**part, "uuid": hashlib.sha256(name).hexdigest()}


def salted(raw: bytes, body: dict[str, Any], salt: str | None) -> tuple[bytes, dict[str, Any]]:
    """A request's body, and the same parsed, with the salt that it is to have.

    Args:
        salt: its tenant's, which replaces the client's; None where there are no keys: the client's
            stays, and one that LMCache would not take is replaced by its hash.
    """
    given = body.get(_FIELD)
    if salt is None:
        if not isinstance(given, str) or not (len(given) > _LONGEST or _UNFIT & set(given)):
            return raw, body
        salt = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()
    return with_member(raw, body, _FIELD, salt)


def with_member(
    raw: bytes, body: dict[str, Any], name: str, value: str
) -> tuple[bytes, dict[str, Any]]:
    """A request's body, and the same parsed, with one more member, or with another value of it.

    Args:
        name: letters and underlines, as are the letters and digits of ``value``.
    """
    own = {**body, name: value}
    # A long history is not written anew for it. (In UTF-16, a zero follows the brace.)
    if name not in body and body and raw[:1] == b"{" and raw[1:2] not in (b"", b"\0"):
        return b'{"%s": "%s", ' % (name.encode(), value.encode()) + raw[1:], own
    return json.dumps(own).encode(), own
