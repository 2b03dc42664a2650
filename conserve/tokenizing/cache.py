"""Keeps the tokens of pieces that were tokenized before."""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from conserve.tokenizing.pieces import Pieces

# Beside an entry's strings and tokens: the key, the array, the table's slots.
_ENTRY_BYTES = 300

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


class TokenCache:
    """Tokenizes prompts by their pieces, each piece once; safe to use from several threads.

    Args:
        encode: tokenizes texts, each by itself, adding nothing; called without a lock held.
        most_bytes: of host memory; the least recently used entries go first.

    Attributes:
        found_tokens, encoded_tokens: of all prompts, from here and from the tokenizer.
    """

    def __init__(self, pieces: Pieces, encode: Encode, most_bytes: int) -> None:
        self._pieces = pieces
        self._encode = encode
        self._most_bytes = most_bytes
        self._bytes = 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.found_tokens = 0
        self.encoded_tokens = 0

    @property
    def held_bytes(self) -> int:
        """Return about how much the entries take."""
        return self._bytes

    def tokens(
        self, text: str, scope: str = "", keeps: bool = True, below_tokens: int | None = None
    ) -> list[int]:
        """Return a prompt's tokens.

        Args:
            scope: only what was tokenized under the same one is found, so that no tenant can tell
                by the time taken what others have sent.
            keeps: whether its pieces are kept.
            below_tokens: nothing is kept of a prompt with as many or more, which is refused.
        """
        pieces = [*self._pieces.of(text)]
        with self._lock:
            parts: list[Sequence[int] | None] = [self._find(scope, piece) for piece in pieces]
            self.found_tokens += sum(len(part) for part in parts if part is not None)
        missing = [at for at, part in enumerate(parts) if part is None]
        encoded = self._encode([pieces[at] for at in missing]) if missing else []
        for at, ids in zip(missing, encoded, strict=True):
            parts[at] = ids
        tokens: list[int] = []
        for part in parts:
            tokens.extend(part or ())
        keeps = keeps and (below_tokens is None or len(tokens) < below_tokens)
        with self._lock:
            self.encoded_tokens += sum(map(len, encoded))
            for at, ids in zip(missing, encoded, strict=True):
                # The last piece will be continued.
                if keeps and at < len(pieces) - 1:
                    self._keep(scope, pieces[at], ids)
        return tokens

    def _find(self, scope: str, piece: str) -> "array[int] | None":
        known = self._known.get((scope, piece))
        if known is not None:
            self._known.move_to_end((scope, piece))
        return known

    def _keep(self, scope: str, piece: str, ids: Sequence[int]) -> None:
        if (scope, piece) in self._known:
            return
        self._known[scope, piece] = array("I", ids)
        self._bytes += _size(scope, piece, ids)
        while self._bytes > self._most_bytes:
            oldest, dropped = self._known.popitem(last=False)
            self._bytes -= _size(*oldest, dropped)


def _size(scope: str, piece: str, ids: Sequence[int]) -> int:
    return sys.getsizeof(scope) + sys.getsizeof(piece) + 4 * len(ids) + _ENTRY_BYTES
