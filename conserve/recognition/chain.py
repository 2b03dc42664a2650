"""Digests of a turn's beginnings, and the histories that they continue."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from conserve.recognition.normal import continued, encoded, normalised

Digest = bytes
"""16 bytes (BLAKE2b) for a list of messages, and the tools before them."""

_DIGEST_BYTES = 16
_LEADING = ("system", "developer")
# The first one must be among them.
_MOST_PROMPTS = 1024


class Chain(NamedTuple):
    """The digests of a turn's beginnings.

    Attributes:
        root: of the first prompt, which is all before the first answer.
        system: of the tools and the system messages at the beginning; None without any.
        ends: for each answer that is followed by anything, or continued, of all up to its end;
            longest first.
        ends_with_root: whether the turn is only its first prompt.
        numbers: for each of ``ends``, how many messages that is, as a chat counts them.
        prompts: of a turn without an answer, of its earlier turns' prompts, perhaps; longest first.
    """

    root: Digest
    system: Digest | None
    ends: Sequence[Digest]
    ends_with_root: bool = False
    numbers: Sequence[int] = ()
    prompts: Sequence[Digest] = ()

    def since(self, root: Digest) -> "Chain":
        """Return the chain as one that began with one of its ``prompts``."""
        ends = tuple(map(_unanswered, self.prompts[: self.prompts.index(root) + 1]))
        return self._replace(root=root, ends=ends, ends_with_root=False, prompts=())


def chain_of(
    messages: Sequence[Mapping[str, Any]],
    before: Mapping[str, Any] | None = None,
    tenant: str | None = None,
    most_ends: int | None = None,
    continues: bool = False,
) -> Chain:
    """Return the chain of a turn. Never raises, whatever the JSON in the arguments.

    No two ``tenant``s have a digest in common. ``before`` stands before the messages, such as
    ``tools``. If it ``continues``, the last message is the assistant's.
    """
    hasher = _hasher(tenant, before)
    given = _as_list(messages)
    root: Digest | None = None
    system: Digest | None = hasher.digest() if (before or {}).get("tools") else None
    leading = True
    ends: list[Digest] = []
    numbers: list[int] = []
    prompts: deque[Digest] = deque(maxlen=_MOST_PROMPTS)
    for number, message in enumerate(given if continues else given[:-1], 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "assistant" and root is None:
            root = hasher.digest()
        hasher.update(encoded(normalised(message)))
        leading = leading and role in _LEADING
        if leading:
            system = hasher.digest()
        elif root is None:
            prompts.appendleft(hasher.digest())
        if role == "assistant":
            ends.append(hasher.digest())
            numbers.append(number)
    first = root is None
    if root is None:
        for message in given[-1:]:
            if _is_answer(message):
                first = False
            else:
                hasher.update(encoded(normalised(message)))
        root = hasher.digest()
    ends.reverse()
    numbers.reverse()
    cut = slice(most_ends)
    earlier = tuple(prompts) if first else ()
    return Chain(root, system, tuple(ends[cut]), first, tuple(numbers[cut]), earlier)


class Beginning:
    """A turn's messages, hashed once for all the answers that it may get; see `chain_of`."""

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

    def tails(self, answer: Mapping[str, Any]) -> tuple[Digest, ...]:
        """Return the digests by which the next turn may be recognised, the likeliest first.

        There are two if a message is continued, which the client may keep with the answer as one,
        or as two; and where no answer is among the messages, as it may leave out this one as well.
        """
        last = self._continued
        if last is None:
            prompt = self._hasher.digest()
            left_out = (_unanswered(prompt),) if prompt == self.root else ()
            return (self._followed_by(answer), *left_out)
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


def _unanswered(prompt: Digest) -> Digest:
    """Return the digest of a prompt whose answer the client leaves out."""
    return hashlib.blake2b(prompt, digest_size=_DIGEST_BYTES, key=b"unanswered").digest()


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _as_list(messages: Any) -> Sequence[Any]:
    # The request is not validated yet, so "messages" may be any JSON value.
    return messages if isinstance(messages, list | tuple) else [messages]


class TailIndex:
    """Finds the histories that a turn which begins with a digest may continue. Not thread-safe.

    Histories with the same messages and answers have the same tail. They stay apart: each
    continuing turn takes one of them, whose tail then moves on. Every operation takes constant time
    for each digest, but ``match`` may pass over busy histories with the same tail.
    """

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        # Most tails have one owner, which is then stored bare. Several are an ordered set, until
        # the last moves on: OrderedDict, because finding a dict's first key takes time for all keys
        # removed before.
        self._owners: dict[Digest, str | OrderedDict[str, None]] = {}

    def add(self, history_id: str, digests: Iterable[Digest]) -> None:
        for digest in digests:
            owners = self._owners.setdefault(digest, history_id)
            if not isinstance(owners, str):
                owners[history_id] = None
            elif owners != history_id:
                self._owners[digest] = OrderedDict.fromkeys((owners, history_id))

    def discard(self, history_id: str, digests: Iterable[Digest]) -> None:
        for digest in digests:
            owners = self._owners.get(digest)
            if owners == history_id:
                del self._owners[digest]
            elif isinstance(owners, OrderedDict):
                owners.pop(history_id, None)
                if not owners:
                    del self._owners[digest]

    def newest(self, digest: Digest) -> Iterator[str]:
        owners = self._owners.get(digest)
        if isinstance(owners, str):
            return iter((owners,))
        return iter(()) if owners is None else reversed(owners)

    def only(self, digest: Digest) -> str | None:
        """Return the history with this tail; None if there is none, or others had it beside it."""
        owners = self._owners.get(digest)
        return owners if isinstance(owners, str) else None

    def match(self, candidates: Iterable[Digest], busy: Callable[[str], bool]) -> str | None:
        """Return the history that a turn with these digests continues, or None.

        The first digest that is a tail decides. Of several histories with it, the least recently
        matched that is not ``busy`` (has no turn running) is taken; None if all are busy.
        """
        for digest in candidates:
            owners = self._owners.get(digest)
            if owners is None:
                continue
            if isinstance(owners, str):
                return None if busy(owners) else owners
            chosen = next((owner for owner in owners if not busy(owner)), None)
            if chosen is not None:
                # It will be busy, so the next match should try the others first.
                owners.move_to_end(chosen)
            return chosen
        return None
