"""Which conversations can be continued by which digest."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from conserve.recognition.chain import Digest


class TailIndex:
    """Which conversations can be continued by a turn that begins with which digest.

    Conversations with the same messages and the same answers (greedy decoding) have the same
    tail. They stay apart: each continuing turn takes one of them, whose tail then moves on.

    Every operation takes constant time a digest; only ``match`` may pass over busy conversations
    with the same tail. Not thread-safe.
    """

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        # Most tails have one owner, which is then stored bare. Several are an ordered set:
        # OrderedDict, because finding a dict's first key takes time for all keys removed before.
        self._owners: dict[Digest, str | OrderedDict[str, None]] = {}

    def add(self, history_id: str, digests: Iterable[Digest]) -> None:
        """Make ``digests`` tails of the conversation (one a choice)."""
        for digest in digests:
            owners = self._owners.setdefault(digest, history_id)
            if not isinstance(owners, str):
                owners[history_id] = None
            elif owners != history_id:
                self._owners[digest] = OrderedDict.fromkeys((owners, history_id))

    def discard(self, history_id: str, digests: Iterable[Digest]) -> None:
        """Forget that ``digests`` are tails of the conversation, as far as they are."""
        for digest in digests:
            owners = self._owners.get(digest)
            if owners == history_id:
                del self._owners[digest]
            elif isinstance(owners, OrderedDict):
                owners.pop(history_id, None)
                if len(owners) == 1:
                    self._owners[digest] = next(iter(owners))

    def newest(self, digest: Digest) -> Iterator[str]:
        """Return the owners of a tail, the newest first."""
        owners = self._owners.get(digest)
        if isinstance(owners, str):
            return iter((owners,))
        return iter(()) if owners is None else reversed(owners)

    def has(self, digest: Digest) -> bool:
        """Whether it is a tail of any."""
        return digest in self._owners

    def is_shared(self, digest: Digest) -> bool:
        """Whether it is a tail of more than one."""
        return isinstance(self._owners.get(digest), OrderedDict)

    def match(self, candidates: Iterable[Digest], busy: Callable[[str], bool]) -> str | None:
        """The history that a turn with these ``candidate_digests`` continues, or None.

        The first candidate that is a tail decides. Of several histories with that tail, one that is
        not ``busy`` (has no turn running) is taken, the least recently matched first; if all are,
        none: the turn leaves them at that point.
        """
        for digest in candidates:
            owners = self._owners.get(digest)
            if owners is None:
                continue
            if isinstance(owners, str):
                return None if busy(owners) else owners
            chosen = next((owner for owner in owners if not busy(owner)), None)
            if chosen is not None:
                # It is about to be busy: let the next match meet the others first.
                owners.move_to_end(chosen)
            return chosen
        return None
