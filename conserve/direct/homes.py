"""A router's memory of where histories live."""

from collections import OrderedDict
from typing import NamedTuple

from conserve.hints import Hints
from conserve.recognition import Chain

_MOST_HOMES = 65_536
# What a prompt has to grow by for it to be worth while to count it, and to ask where it is to be
# computed. A request grows by a byte at least for each token, and mostly by four.
LARGE_TOKENS = 1_000
_BYTES_PER_TOKEN = 4


class Home(NamedTuple):
    """A decoder that had a history's last turn, as far as a router knows.

    Attributes:
        hints: what its client said of it when the table was asked last; None: nothing.
        request_bytes: length of the body of its last turn; 0: not known.
    """

    decoder_id: str
    url: str
    hints: Hints | None = None
    request_bytes: int = 0

    def appends_much(self, request_bytes: int) -> bool:
        """Whether a turn with a body of so many bytes may append a large prefill."""
        return 0 < self.request_bytes <= request_bytes - _BYTES_PER_TOKEN * LARGE_TOKENS


class Homes:
    """Remembers where the histories of a first prompt live: of each conversation, the newest.

    Completions of a conversation are one history, which has no messages: its id alone says where.

    It is a guess and no authority. The decoder says whether a turn goes on with a history that it
    holds (`Desk`), so an entry that is wrong costs a call, and nothing else.

    Args:
        most: so many are kept, those that were used last.

    Example:
        >>> homes = Homes()
        >>> first, later = Chain(b"root", None, (), True), Chain(b"root", None, (b"end",))
        >>> homes.remember("c", first, Home("d1", "http://d1"))
        >>> homes.find("c", later, None).decoder_id
        'd1'
        >>> homes.find("c", first, None), homes.find(None, later, None)
        (None, None)
    """

    def __init__(self, most: int = _MOST_HOMES) -> None:
        self._most = most
        self._homes: OrderedDict[tuple[str, bytes], Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def remember(self, conversation_id: str | None, chain: Chain | None, home: Home) -> None:
        """A turn is served there.

        Args:
            conversation_id: as its client states it, scoped to the tenant; None: it does not.
            chain: of its messages; None: of a completion, which is not remembered without an id.
        """
        key = _key(conversation_id, chain)
        if key is None:
            return
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def find(
        self, conversation_id: str | None, chain: Chain | None, hints: Hints | None
    ) -> Home | None:
        """Return where to try a turn; None: ask the table.

        Args:
            hints: what its client says of it now; None: nothing. The table is to be told what is
                new.
        """
        key = _key(conversation_id, chain)
        if key is None or key not in self._homes or (chain is not None and not chain.ends):
            return None
        home = self._homes[key]
        if hints is not None and hints != home.hints:
            return None
        self._homes.move_to_end(key)
        return home

    def forget(self, conversation_id: str | None, chain: Chain | None) -> None:
        """Forget what is remembered of a turn: it is wrong."""
        key = _key(conversation_id, chain)
        if key is not None:
            self._homes.pop(key, None)


def _key(conversation_id: str | None, chain: Chain | None) -> tuple[str, bytes] | None:
    if chain is not None:
        return conversation_id or "", chain.root
    return None if conversation_id is None else (conversation_id, b"")
