"""Digests of a turn's beginnings, and the histories that they continue."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from conserve.recognition.normal import SYSTEM_ROLES, continued, encoded, normalised

Digest = bytes
"""16 bytes (BLAKE2b) for a list of messages, and the tools before them."""

_DIGEST_BYTES = 16
# The first one must be among them.
_MOST_PROMPTS = 1024


class Beginning(NamedTuple):
    """A turn's messages, as its decoder needs them for the answers that the turn may get.

    Attributes:
        digest: of all messages, but for one that is continued.
        alone: whether no answer is among them.
        continues: whether the last message is the assistant's, which goes on with it.
    """

    digest: Digest
    alone: bool = False
    continues: bool = False

    def tails(self, answer: Mapping[str, Any], last: Any = None) -> tuple[Digest, ...]:
        """Return the digests by which the next turn may be recognised, the likeliest first.

        There are two if a message is continued, which the client may keep with the answer as one,
        or as two; and where no answer is among the messages, as it may leave out this one as well.

        Args:
            last: the message that is continued, if one is.
        """
        if not self.continues:
            left_out = (_unanswered(self.digest),) if self.alone else ()
            return (_followed(self.digest, answer), *left_out)
        as_one = _followed(self.digest, continued(last, answer))
        as_two = _followed(_followed(self.digest, last), answer)
        return (as_one,) if as_one == as_two else (as_one, as_two)


class Chain(NamedTuple):
    """The digests of a turn's beginnings. Each is that of the one before, and a message.

    Attributes:
        root: of the first prompt, which is all before the first answer.
        system: of the tools and the system messages at the beginning; None without any.
        ends: for each answer that is followed by anything, or continued, of all up to its end;
            longest first.
        ends_with_root: whether the turn is only its first prompt.
        numbers: for each of ``ends``, how many messages that is, as a chat counts them.
        prompts: of a turn without an answer, of its earlier turns' prompts, perhaps; longest first.
        beginning: for the answers to come.
        tools: of the tools, with a chat template and a cache salt.
    """

    root: Digest
    system: Digest | None
    ends: Sequence[Digest]
    ends_with_root: bool = False
    numbers: Sequence[int] = ()
    prompts: Sequence[Digest] = ()
    beginning: Beginning = Beginning(b"")
    tools: Digest = b""

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
    # The request is not validated yet, so it may be any JSON value.
    given = messages if isinstance(messages, list | tuple) else [messages]
    tools = digest = whole = _of_none(tenant, before)
    root: Digest | None = None
    system: Digest | None = tools if (before or {}).get("tools") else None
    leading = True
    ends: list[Digest] = []
    numbers: list[int] = []
    prompts: deque[Digest] = deque(maxlen=_MOST_PROMPTS)
    for number, message in enumerate(given, 1):
        is_last, role = number == len(given), _role(message)
        if role == "assistant" and root is None:
            root = digest
        digest = _followed(digest, message)
        if not (is_last and continues):
            whole = digest
            if is_last:
                break
        leading = leading and role in SYSTEM_ROLES
        if leading:
            system = digest
        elif root is None:
            prompts.appendleft(digest)
        if role == "assistant":
            ends.append(digest)
            numbers.append(number)
    first = root is None
    ends.reverse()
    numbers.reverse()
    cut = slice(most_ends)
    return Chain(
        digest if root is None else root,
        system,
        tuple(ends[cut]),
        first,
        tuple(numbers[cut]),
        tuple(prompts) if first else (),
        Beginning(whole, first, continues),
        tools,
    )


def _of_none(tenant: str | None, before: Mapping[str, Any] | None) -> Digest:
    """Return the digest of no message, from which all others of a tenant come."""
    # A key is at most 64 bytes long, and so is a tenant's name.
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=(tenant or "").encode())
    if before:
        hasher.update(encoded(["before", before]))
    return hasher.digest()


def _followed(digest: Digest, message: Any) -> Digest:
    """Return the digest of the messages that have this one, and one more."""
    hasher = hashlib.blake2b(digest, digest_size=_DIGEST_BYTES)
    hasher.update(encoded(normalised(message)))
    return hasher.digest()


def _unanswered(prompt: Digest) -> Digest:
    """Return the digest of a prompt whose answer the client leaves out."""
    return hashlib.blake2b(prompt, digest_size=_DIGEST_BYTES, key=b"unanswered").digest()


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


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
