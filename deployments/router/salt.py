"""Salts prompts: engines share no KV between prompts with different salts."""

import hashlib
from typing import Any

_FIELD = "cache_salt"
# LMCache 0.5.6 takes no others (`IPCCacheServerKey`): its connector fails the whole engine, in the
# scheduler.
_LONGEST = 128
_UNFIT = frozenset("@/\\\0")


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
