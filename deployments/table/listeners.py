"""Decoders that begin turns by themselves: what they are told, and who waits until they have heard.

What may be begun where is `conserve.direct`'s affair; this waits.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection

from conserve.direct import LEASE_S, Notice, Notices
from conserve.history import TurnKey
from conserve.wire import BEAT_S, SILENCE_S

# How long to wait for decoders to say what they have done: whoever asks what there is, begins a
# turn beside another or ends a conversation, as long as a decoder may begin turns; and whoever
# moves one, as long as a decoder may be silent.
LOOK_S, MOVE_S = LEASE_S, SILENCE_S


class Listeners:
    """One of each table."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        notices.tell = self._has_news
        self._news: dict[str, asyncio.Event] = {}
        self._waiting: set[tuple[str, int, asyncio.Future[None]]] = set()
        # Turns that they have begun; of those of a decoder that is lost nobody else tells.
        self._begun: defaultdict[str, set[TurnKey]] = defaultdict(set)

    async def hear(self, decoder_id: str, registration: int, heard: int) -> Notice | None:
        """Return what is new for a decoder, at once or within a beat; None: it has to register.

        Args:
            heard: the last notice that it has obeyed.
        """
        notices = self._notices
        if not notices.is_current(decoder_id, registration):
            return None
        news = self._news.setdefault(decoder_id, asyncio.Event())
        due = notices.due(decoder_id, heard)
        if due is None or due.number > heard:
            return due
        news.clear()
        waiting = asyncio.ensure_future(news.wait())
        try:
            await asyncio.wait([waiting], timeout=BEAT_S)
        finally:
            waiting.cancel()
        if not notices.is_current(decoder_id, registration):
            return None
        return notices.due(decoder_id, heard)

    def confirmed(self, decoder_id: str, heard: int) -> None:
        """A decoder has heard so much."""
        self._notices.confirm(decoder_id, heard)
        self._let_go()

    async def have_heard(self, decoder_ids: Collection[str], patience_s: float) -> bool:
        """Return when all that these have done, or were told, until now is known; or after so long.

        Returns:
            Whether it is.
        """
        loop = asyncio.get_running_loop()
        asked = {decoder_id: self._notices.probe(decoder_id) for decoder_id in decoder_ids}
        waiting: list[tuple[str, int, asyncio.Future[None]]] = [
            (decoder_id, number, loop.create_future())
            for decoder_id, number in asked.items()
            if not self._notices.has_heard(decoder_id, number)
        ]
        if not waiting:
            return True
        self._waiting.update(waiting)
        try:
            _, left = await asyncio.wait([one[2] for one in waiting], timeout=patience_s)
        finally:
            self._waiting.difference_update(waiting)
        return not left

    # --- turns -------------------------------------------------------------------------------

    def began(self, turn: TurnKey, decoder_id: str) -> None:
        """A decoder has begun a turn by itself."""
        self._begun[decoder_id].add(turn)

    def ended(self, turn: TurnKey, decoder_id: str) -> None:
        """A turn has ended there."""
        self._begun[decoder_id].discard(turn)

    def lost(self, decoder_id: str) -> set[TurnKey]:
        """A decoder is gone; returns the turns that it had begun by itself."""
        return self._begun.pop(decoder_id, set())

    # --- inside ------------------------------------------------------------------------------

    def _has_news(self, decoder_id: str) -> None:
        if decoder_id in self._news:
            self._news[decoder_id].set()
        if decoder_id not in self._notices.decoders:
            self._news.pop(decoder_id, None)
            self._let_go()

    def _let_go(self) -> None:
        for decoder_id, number, future in self._waiting:
            if not future.done() and self._notices.has_heard(decoder_id, number):
                future.set_result(None)
