"""Under which salt engines keep a prompt's KV: prompts with different salts never share any."""

import hashlib
import json
from typing import Any

_FIELD = "cache_salt"
# What LMCache 0.5.6 takes (`IPCCacheServerKey`); its connector fails the whole engine on any other,
# in the scheduler.
_LONGEST = 128
_UNFIT = frozenset("@/\\\0")
# What holds parts.
_HOLDERS = ("content", "output")


def own_media(messages: Any, salt: str) -> Any:
    """Messages in which no part goes by a name that another tenant could give.

    vLLM keeps what it has made of an image under the ``uuid`` of its part, whatever the salt: who
    names another's gets it to see, and who names one first has others see it. A name that this has
    given before stays: histories come back from decoders as these got them.

    Args:
        messages: of a chat or of Messages, or items of Responses; any JSON.

    Returns:
        The same object, if no part has a name.
    """
    return _each_owned(messages, salt)


def _each_owned(given: Any, salt: str) -> Any:
    if not isinstance(given, list):
        return given
    changed = [_owned(one, salt) for one in given]
    same = all(one is other for one, other in zip(changed, given, strict=True))
    return given if same else changed


def _owned(one: Any, salt: str) -> Any:
    """A message, an item or a part of either: parts stand in contents, and in outputs of tools."""
    if not isinstance(one, dict):
        return one
    changed = {
        name: owned
        for name in _HOLDERS
        if (owned := _each_owned(one.get(name), salt)) is not one.get(name)
    }
    if one.get("uuid") is not None:
        changed["uuid"] = _own_name(one["uuid"], salt)
    return {**one, **changed} if changed else one


def _own_name(name: Any, salt: str) -> str:
    mark, _, given = name.partition("-") if isinstance(name, str) else ("", "", "")
    if given and mark == _hashed(salt, given):
        return str(name)
    given = _hashed(salt, name)
    return f"{_hashed(salt, given)}-{given}"


def _hashed(salt: str, value: Any) -> str:
    return hashlib.sha256(json.dumps([salt, value]).encode()).hexdigest()[:32]


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
