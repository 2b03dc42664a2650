"""Digests of a turn's beginnings: a hash chain over messages in their normal form."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from conserve.recognition.normal import encoded, normalised

Digest = bytes
"""16 bytes (BLAKE2b) that stand for a list of messages."""

_DIGEST_BYTES = 16


def candidate_digests(
    messages: Sequence[Mapping[str, Any]], tenant: str | None = None
) -> list[Digest]:
    """The tails that these messages may continue, longest first.

    One digest for each assistant message that at least one message follows: of all messages up to
    and including it. Never raises, whatever JSON stands in ``messages``.

    Args:
        tenant: whose messages they are; no two tenants have a digest in common.
    """
    hasher = _hasher(tenant)
    digests = []
    for message in _as_list(messages)[:-1]:
        hasher.update(encoded(normalised(message)))
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            digests.append(hasher.digest())
    digests.reverse()
    return digests


def tail_digest(
    messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], tenant: str | None = None
) -> Digest:
    """The digest of a finished turn: its messages, then its answer.

    It is among the ``candidate_digests`` of every turn of this tenant that begins with these
    messages and this answer. Never raises, whatever JSON stands in the arguments.
    """
    return Beginning(messages, tenant).tail_digest(answer)


class Beginning:
    """A turn's messages, hashed once for all the answers that it may get."""

    __slots__ = ("_hasher",)

    def __init__(self, messages: Sequence[Mapping[str, Any]], tenant: str | None = None) -> None:
        self._hasher = _hasher(tenant)
        for message in _as_list(messages):
            self._hasher.update(encoded(normalised(message)))

    def tail_digest(self, answer: Mapping[str, Any]) -> Digest:
        """As `tail_digest` has it."""
        hasher = self._hasher.copy()
        hasher.update(encoded(normalised(answer)))
        return hasher.digest()


def _hasher(tenant: str | None) -> "hashlib.blake2b":
    # A key is at most 64 bytes long, and so is a tenant's name.
    return hashlib.blake2b(digest_size=_DIGEST_BYTES, key=(tenant or "").encode())


def _as_list(messages: Any) -> Sequence[Any]:
    # Called before the request is validated: "messages" may be any JSON value.
    return messages if isinstance(messages, list | tuple) else [messages]
