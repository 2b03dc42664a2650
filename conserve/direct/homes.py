"""A router's memory of which decoder has each history."""

from collections import OrderedDict
from typing import NamedTuple

from conserve.hints import Hints
from conserve.recognition import Chain

_MOST_HOMES = 65_536
# A prompt that grows by less is not worth counting its tokens and asking where to compute them. A
# request grows by at least a byte for each token, and mostly by four. Images are not counted in its
# bytes: one may be thousands of tokens, and has to be encoded.
LARGE_TOKENS = 1_000
_BYTES_PER_TOKEN = 4


class Home(NamedTuple):
    """The decoder that had a history's last turn, as far as a router knows.

    Attributes:
        hints: as the table was last told them.
        request_bytes: length of its last turn's body, without images; 0 if not known.
        media: how many images, or other parts with media, that body had.
    """

    decoder_id: str
    url: str
    hints: Hints | None = None
    request_bytes: int = 0
    media: int = 0

    def appends_much(self, request_bytes: int, media: int) -> bool:
        if not self.request_bytes:
            return False
        more_bytes = request_bytes - self.request_bytes
        return more_bytes >= _BYTES_PER_TOKEN * LARGE_TOKENS or media > self.media


class Homes:
    """Remembers, for each first prompt in a conversation, the decoder of its newest history.

    A conversation's completions are one history without messages, found by its id. An entry is a
    guess: the decoder checks it (`Desk`), so a wrong one costs one call.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[str, bytes], Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def remember(self, conversation_id: str | None, chain: Chain | None, home: Home) -> None:
        """Remember where a turn is served; ``chain`` is None for a completion."""
        key = _key(conversation_id, chain)
        if key is None:
            return
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)

    def find(
        self, conversation_id: str | None, chain: Chain | None, hints: Hints | None
    ) -> Home | None:
        """Return where to try a turn; None means to ask the table, as for new hints."""
        key = _key(conversation_id, chain)
        if key is None or key not in self._homes or (chain is not None and not chain.ends):
            return None
        home = self._homes[key]
        if hints is not None and hints != home.hints:
            return None
        self._homes.move_to_end(key)
        return home

    def forget(self, conversation_id: str | None, chain: Chain | None) -> None:
        key = _key(conversation_id, chain)
        if key is not None:
            self._homes.pop(key, None)


def _key(conversation_id: str | None, chain: Chain | None) -> tuple[str, bytes] | None:
    if chain is not None:
        return conversation_id or "", chain.root
    return None if conversation_id is None else (conversation_id, b"")
