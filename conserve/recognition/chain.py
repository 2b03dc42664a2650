"""Digests of a turn's beginnings: a hash chain over its tools and its messages in normal form."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from conserve.recognition.normal import continued, encoded, normalised

Digest = bytes
"""16 bytes (BLAKE2b) that stand for a list of messages, and the tools before them."""

_DIGEST_BYTES = 16
_LEADING = ("system", "developer")


class Chain(NamedTuple):
    """Tells where a turn's messages may have been heard before.

    Attributes:
        root: the first prompt, which is all before the first answer. Whatever goes back to an
            earlier point of a history has its root.
        system: the tools and the system messages at the beginning; None where there are neither.
        ends: for each answer that is followed by anything, or continued, all up to its end;
            longest first.
        ends_with_root: whether the turn is its first prompt and nothing else.
    """

    root: Digest
    system: Digest | None
    ends: Sequence[Digest]
    ends_with_root: bool = False


def chain_of(
    messages: Sequence[Mapping[str, Any]],
    before: Mapping[str, Any] | None = None,
    tenant: str | None = None,
    most_ends: int | None = None,
    continues: bool = False,
) -> Chain:
    """The chain of a turn. Never raises, whatever JSON stands in the arguments.

    Args:
        before: what else the beginning of a prompt is made of, by name: ``tools`` stand before
            the messages. Another one is another chain.
        tenant: whose messages they are; no two tenants have a digest in common.
        most_ends: of the longest beginnings, so many.
        continues: whether the last message, the assistant's, is to be continued.
    """
    hasher = _hasher(tenant, before)
    given = _as_list(messages)
    root: Digest | None = None
    system: Digest | None = hasher.digest() if (before or {}).get("tools") else None
    leading = True
    ends: list[Digest] = []
    for message in given if continues else given[:-1]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "assistant" and root is None:
            root = hasher.digest()
        hasher.update(encoded(normalised(message)))
        leading = leading and role in _LEADING
        if leading:
            system = hasher.digest()
        if role == "assistant":
            ends.append(hasher.digest())
    first = root is None
    if root is None:
        for message in given[-1:]:
            if _is_answer(message):
                first = False
            else:
                hasher.update(encoded(normalised(message)))
        root = hasher.digest()
    ends.reverse()
    return Chain(root, system, tuple(ends[:most_ends]), first)


def candidate_digests(
    messages: Sequence[Mapping[str, Any]], tenant: str | None = None
) -> list[Digest]:
    """The tails that these messages may continue, longest first: a chain's ``ends``."""
    return list(chain_of(messages, tenant=tenant).ends)


def tail_digest(
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    tenant: str | None = None,
) -> Digest:
    """The digest of a finished turn: its messages, then its answer.

    It is among the ``candidate_digests`` of every turn of this tenant that begins with these
    messages and this answer. Never raises, whatever JSON stands in the arguments.
    """
    return Beginning(messages, tenant=tenant).tail_digest(answer)


class Beginning:
    """A turn's messages, hashed once for all the answers that it may get.

    Args:
        messages: the turn's.
        before: as `chain_of` has it, and the others.

    Attributes:
        root: as `Chain` has it.
    """

    __slots__ = ("_continued", "_hasher", "root")

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        before: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        continues: bool = False,
    ) -> None:
        self._hasher = _hasher(tenant, before)
        given = _as_list(messages)
        self._continued = given[-1] if continues else None
        root: Digest | None = None
        for message in given[:-1] if continues else given:
            if root is None and _is_answer(message):
                root = self._hasher.digest()
            self._hasher.update(encoded(normalised(message)))
        self.root = self._hasher.digest() if root is None else root

    def tail_digest(self, answer: Mapping[str, Any]) -> Digest:
        """As `tail_digest` has it."""
        return self.tails(answer)[0]

    def tails(self, answer: Mapping[str, Any]) -> tuple[Digest, ...]:
        """The digests by which the next turn may be recognised, the likeliest first.

        There are two where a message is continued: its client may keep that message and the answer
        as one message, or as two.
        """
        last = self._continued
        if last is None:
            return (self._followed_by(answer),)
        as_one, as_two = self._followed_by(continued(last, answer)), self._followed_by(last, answer)
        return (as_one,) if as_one == as_two else (as_one, as_two)

    def _followed_by(self, *messages: Any) -> Digest:
        hasher = self._hasher.copy()
        for message in messages:
            hasher.update(encoded(normalised(message)))
        return hasher.digest()


def _hasher(tenant: str | None, before: Mapping[str, Any] | None) -> "hashlib.blake2b":
    # A key is at most 64 bytes long, and so is a tenant's name.
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=(tenant or "").encode())
    if before:
        hasher.update(encoded(["before", before]))
    return hasher


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _as_list(messages: Any) -> Sequence[Any]:
    # Called before the request is validated: "messages" may be any JSON value.
    return messages if isinstance(messages, list | tuple) else [messages]
