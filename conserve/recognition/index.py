"""Finds the histories that a digest continues."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from conserve.recognition.chain import Digest


class TailIndex:
    """Finds the histories that a turn which begins with a digest may continue. Not thread-safe.

    Histories with the same messages and answers have the same tail. They stay apart: each
    continuing turn takes one of them, whose tail then moves on. Every operation takes constant time
    for each digest, but ``match`` may pass over busy histories with the same tail.
    """

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        # Most tails have one owner, which is then stored bare. Several are an ordered set:
        # OrderedDict, because finding a dict's first key takes time for all keys removed before.
        self._owners: dict[Digest, str | OrderedDict[str, None]] = {}

    def add(self, history_id: str, digests: Iterable[Digest]) -> None:
        for digest in digests:
            owners = self._owners.setdefault(digest, history_id)
            if not isinstance(owners, str):
                owners[history_id] = None
            elif owners != history_id:
                self._owners[digest] = OrderedDict.fromkeys((owners, history_id))

    def discard(self, history_id: str, digests: Iterable[Digest]) -> None:
        """Forget that ``digests`` are tails of the history, as far as they are."""
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
        return digest in self._owners

    def is_shared(self, digest: Digest) -> bool:
        return isinstance(self._owners.get(digest), OrderedDict)

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
