"""Salts prompts: engines share no KV between prompts with different salts."""

import hashlib
import json
from typing import Any

_FIELD = "cache_salt"
# LMCache 0.5.6 takes no others (`IPCCacheServerKey`): its connector fails the whole engine, in the
# scheduler.
_LONGEST = 128
_UNFIT = frozenset("@/\\\0")
# Members that hold parts.
_HOLDERS = ("content", "output")


def own_media(body: dict[str, Any], salt: str | None) -> dict[str, Any]:
    """Return a request in which no part goes by a name that another tenant could give.

    vLLM keeps what it has made of an image under the ``uuid`` of its part, whatever the salt. A
    tenant that named another's image would get it to see. A name that this function has given stays
    as it is: histories come back from decoders as these got them. Without keys, names stay.

    Returns:
        The same object, if no part has a name.
    """
    if salt is None:
        return body
    changed = {
        name: owned
        for name in ("messages", "input")
        if (owned := _each_owned(body.get(name), salt)) is not body.get(name)
    }
    return {**body, **changed} if changed else body


def _each_owned(given: Any, salt: str) -> Any:
    if not isinstance(given, list):
        return given
    changed = [_owned(one, salt) for one in given]
    same = all(one is other for one, other in zip(changed, given, strict=True))
    return given if same else changed


def _owned(one: Any, salt: str) -> Any:
    """Return a message, an item or a part; parts stand in contents, and in outputs of tools."""
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


def with_salt(body: dict[str, Any], salt: str | None) -> dict[str, Any]:
    """Return a request with the salt under which engines keep its KV.

    Args:
        salt: its tenant's, which replaces the client's. None where there are no keys: the client's
            stays, and one that LMCache would not take is replaced by its hash.
    """
    given = body.get(_FIELD)
    if salt is None:
        if not isinstance(given, str) or not (len(given) > _LONGEST or _UNFIT & set(given)):
            return body
        salt = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()
    return {**body, _FIELD: salt}
