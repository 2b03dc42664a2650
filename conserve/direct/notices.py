"""Tells decoders which turns they may no longer begin by themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Notice(NamedTuple):
    """Tells a decoder what to obey before it says so (`Report.heard`).

    Attributes:
        number: counts them.
        given_up: histories (and incarnations) that the table has unbound: their next turn is the
            table's to place.
        ended: those that have ended.
        parks: whether a turn that begins now leaves its prompt's KV in host memory.
    """

    number: int
    given_up: tuple[tuple[str, int], ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    parks: bool = False


@dataclass(slots=True)
class _Decoder:
    registration: int
    number: int = 0
    heard: int = 0
    reported: int = 0
    # By history: its incarnation, the notice that says so, and whether it has ended.
    given_up: dict[str, tuple[int, int, bool]] = field(default_factory=dict)


class Notices:
    """Which histories each decoder was told to give up, and whether it has heard.

    What a decoder has begun before it heard has been told before it says so: reports come in order.
    So once a notice is confirmed, no turn of a history that was given up runs there unknown to the
    table, and none will begin. Until then the history is bound nowhere else.

    Attributes:
        tell: called with a decoder's id when there is something new for it, or it is gone.

    Example:
        >>> notices = Notices()
        >>> notices.add("d", registration=1)
        >>> notices.give_up("d", "c", incarnation=7)
        >>> notices.due("d", heard=0).given_up, notices.unconfirmed("c")
        ((('c', 7),), ['d'])
        >>> notices.confirm("d", 1)
        >>> notices.due("d", heard=1).given_up, notices.unconfirmed("c")
        ((), [])
    """

    def __init__(self) -> None:
        self._decoders: dict[str, _Decoder] = {}
        self.tell: Callable[[str], None] = lambda _: None

    # --- decoders ----------------------------------------------------------------------------

    def add(self, decoder_id: str, registration: int) -> None:
        """A decoder has registered, which begins turns by itself."""
        known = self._decoders.get(decoder_id)
        if known is None or known.registration != registration:
            self._decoders[decoder_id] = _Decoder(registration)
            self.tell(decoder_id)

    def remove(self, decoder_id: str) -> None:
        """A decoder is lost, or has left."""
        if self._decoders.pop(decoder_id, None) is not None:
            self.tell(decoder_id)

    def is_current(self, decoder_id: str, registration: int) -> bool:
        """Whether this is how the decoder is known."""
        known = self._decoders.get(decoder_id)
        return known is not None and known.registration == registration

    @property
    def decoders(self) -> list[str]:
        """Return the decoders that begin turns by themselves."""
        return list(self._decoders)

    # --- what they are told ------------------------------------------------------------------

    def give_up(
        self, decoder_id: str, history_id: str, incarnation: int, *, ended: bool = False
    ) -> None:
        """A history is no more on this decoder: it is bound nowhere, or has ended."""
        decoder = self._decoders.get(decoder_id)
        if decoder is not None:
            decoder.number += 1
            decoder.given_up[history_id] = (incarnation, decoder.number, ended)
            self.tell(decoder_id)

    def probe(self, decoder_id: str) -> int:
        """A notice that says nothing: once it is heard, all that was done before is known.

        Returns:
            Its number.
        """
        decoder = self._decoders.get(decoder_id)
        if decoder is None:
            return 0
        decoder.number += 1
        self.tell(decoder_id)
        return decoder.number

    def due(self, decoder_id: str, heard: int) -> Notice | None:
        """Return what a decoder is to be told that has heard so much; None: it is not known."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None:
            return None
        new: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        for history_id, (incarnation, number, ended) in decoder.given_up.items():
            if number > heard:
                new[ended].append((history_id, incarnation))
        return Notice(decoder.number, tuple(new[False]), tuple(new[True]))

    def confirm(self, decoder_id: str, heard: int) -> None:
        """A decoder has heard so much, and told all that it had done before."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None or heard <= decoder.heard:
            return
        decoder.heard = heard
        for history_id, (_, number, _) in list(decoder.given_up.items()):
            if number <= heard:
                del decoder.given_up[history_id]

    # --- what can be asked -------------------------------------------------------------------

    def has_heard(self, decoder_id: str, number: int) -> bool:
        """Whether a notice was confirmed; it was by a decoder that is gone."""
        decoder = self._decoders.get(decoder_id)
        return decoder is None or decoder.heard >= number

    def unconfirmed(self, history_id: str) -> list[str]:
        """The decoders that have not said yet that they have given this history up."""
        return [id for id, one in self._decoders.items() if history_id in one.given_up]

    def may_run(self, decoder_id: str, history_id: str, incarnation: int) -> bool:
        """Whether a turn of a history that was given up may have begun before that was heard."""
        decoder = self._decoders.get(decoder_id)
        told = None if decoder is None else decoder.given_up.get(history_id)
        return told is not None and told[0] == incarnation

    def is_new(self, decoder_id: str, report: int) -> bool:
        """Whether a report is the next one, and was not taken before; it is taken now."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None or report != decoder.reported + 1:
            return False
        decoder.reported = report
        return True
