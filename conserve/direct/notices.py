"""Tells decoders which turns they may no longer begin by themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Notice(NamedTuple):
    """Orders for a decoder: the histories and incarnations to give up."""

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
    # By history: its incarnation, the notice's number, and whether it has ended.
    given_up: dict[str, tuple[int, int, bool]] = field(default_factory=dict)


class Notices:
    """Keeps which histories each decoder was told to give up, and whether it has confirmed that.

    Reports come in order, so once a notice is confirmed, no turn of such a history runs there
    unknown to the table. Until then the history is bound nowhere else. ``tell`` is called with a
    decoder's id when there is something new for it, or it is gone.
    """

    def __init__(self) -> None:
        self._decoders: dict[str, _Decoder] = {}
        self.tell: Callable[[str], None] = lambda _: None

    def add(self, decoder_id: str, registration: int) -> None:
        known = self._decoders.get(decoder_id)
        if known is None or known.registration != registration:
            self._decoders[decoder_id] = _Decoder(registration)
            self.tell(decoder_id)

    def remove(self, decoder_id: str) -> None:
        if self._decoders.pop(decoder_id, None) is not None:
            self.tell(decoder_id)

    def is_current(self, decoder_id: str, registration: int) -> bool:
        known = self._decoders.get(decoder_id)
        return known is not None and known.registration == registration

    @property
    def decoders(self) -> list[str]:
        return list(self._decoders)

    def give_up(
        self, decoder_id: str, history_id: str, incarnation: int, *, ended: bool = False
    ) -> None:
        decoder = self._decoders.get(decoder_id)
        if decoder is not None:
            decoder.number += 1
            decoder.given_up[history_id] = (incarnation, decoder.number, ended)
            self.tell(decoder_id)

    def probe(self, decoder_id: str) -> int:
        """Add an empty notice and return its number; once confirmed, all before is known."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None:
            return 0
        decoder.number += 1
        self.tell(decoder_id)
        return decoder.number

    def due(self, decoder_id: str, heard: int) -> Notice | None:
        """Return the notice for a decoder, of what it has not heard; None if it is not known."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None:
            return None
        new: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        for history_id, (incarnation, number, ended) in decoder.given_up.items():
            if number > heard:
                new[ended].append((history_id, incarnation))
        return Notice(decoder.number, tuple(new[False]), tuple(new[True]))

    def confirm(self, decoder_id: str, heard: int) -> None:
        """Note that a decoder has obeyed notices up to ``heard``."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None or heard <= decoder.heard:
            return
        decoder.heard = heard
        for history_id, (_, number, _) in list(decoder.given_up.items()):
            if number <= heard:
                del decoder.given_up[history_id]

    def has_heard(self, decoder_id: str, number: int) -> bool:
        """Return whether a notice was confirmed, or its decoder is gone."""
        decoder = self._decoders.get(decoder_id)
        return decoder is None or decoder.heard >= number

    def unconfirmed(self, history_id: str) -> list[str]:
        return [id for id, one in self._decoders.items() if history_id in one.given_up]

    def may_run(self, decoder_id: str, history_id: str, incarnation: int) -> bool:
        """Return whether a turn may have begun before its decoder heard to give its history up."""
        decoder = self._decoders.get(decoder_id)
        told = None if decoder is None else decoder.given_up.get(history_id)
        return told is not None and told[0] == incarnation

    def is_new(self, decoder_id: str, report: int) -> bool:
        """Accept a report if it is the next one, and return whether it is."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None or report != decoder.reported + 1:
            return False
        decoder.reported = report
        return True
