"""Chooses the encoder of each new image, among those on the node where its prompt is computed."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

# An encoder that has failed, or was too slow, is passed over for as long as the table takes to
# notice that an engine is silent.
PASSED_OVER_S = 15.0
_MOST_KNOWN = 65_536


class Encoder(NamedTuple):
    """An engine that only encodes."""

    id: str
    url: str


def node_of(url: str) -> str:
    """Return the address of an engine's node, which is where its memory is."""
    return urlsplit(url).hostname or ""


class Encoders:
    """A router's account of its encoders: what each encodes for it, and which images nodes have.

    It offers an image to a node's encoders once. Whatever comes of that, the image is encoded on
    the node by the end of the turn: where no encoder does it, the engine that needs it does.

    Example:
        >>> encoders = Encoders()
        >>> encoders.update([Encoder("a", "http://n1:1"), Encoder("b", "http://n1:2")])
        >>> first = encoders.begin("n1", "image", now_s=0.0)
        >>> second = encoders.begin("n1", "other", now_s=0.0)
        >>> first.id, second.id, encoders.begin("n2", "image", now_s=0.0)
        ('a', 'b', None)
        >>> encoders.end(first, "image")
        >>> encoders.lacks("image"), encoders.lacks("other")
        (False, True)
    """

    def __init__(self, most_known: int = _MOST_KNOWN) -> None:
        self._most_known = most_known
        # Replaced as a whole: `lacks` is called in a thread.
        self._living: tuple[Encoder, ...] = ()
        # The images that each encodes now, by the encoder's id.
        self._running: dict[str, Counter[str]] = {}
        self._passed_over_until_s: dict[str, float] = {}
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def update(self, living: Iterable[Encoder]) -> None:
        """Take over which encoders there are, as the table has said."""
        self._living = tuple(living)
        ids = {one.id for one in self._living}
        for gone in self._passed_over_until_s.keys() - ids:
            del self._passed_over_until_s[gone]

    @property
    def has_any(self) -> bool:
        return bool(self._living)

    def lacks(self, name: str) -> bool:
        """Return whether a node with an encoder may not have this image."""
        return any((node_of(one.url), name) not in self._known for one in self._living)

    def begin(self, node: str, name: str, now_s: float) -> Encoder | None:
        """Return the encoder for an image, which counts as its work until `end`.

        It is the one that encodes the same image already, or else the one with the fewest.

        Returns:
            None if the node has the image, or no encoder.
        """
        if (node, name) in self._known:
            return None
        able = [
            one
            for one in self._living
            if node_of(one.url) == node and self._passed_over_until_s.get(one.id, now_s) <= now_s
        ]
        if not able:
            return None
        chosen = min(able, key=lambda one: self._work(one.id, name))
        self._running.setdefault(chosen.id, Counter())[name] += 1
        return chosen

    def _work(self, encoder_id: str, name: str) -> tuple[bool, int]:
        running = self._running.get(encoder_id, Counter())
        return name not in running, running.total()

    def end(self, encoder: Encoder, name: str) -> None:
        """Note that an image is encoded, or will be by the engine that needs it."""
        self.give_up(encoder, name)
        self._known[node_of(encoder.url), name] = None
        if len(self._known) > self._most_known:
            self._known.popitem(last=False)

    def give_up(self, encoder: Encoder, name: str) -> None:
        """Note that an image's turn has ended before it was encoded."""
        if left := self._running.pop(encoder.id) - Counter((name,)):
            self._running[encoder.id] = left

    def failed(self, encoder: Encoder, now_s: float) -> None:
        self._passed_over_until_s[encoder.id] = now_s + PASSED_OVER_S
