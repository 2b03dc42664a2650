"""A decoder's own account of its histories, from which a lost conversation table is rebuilt."""

import copy
from typing import NamedTuple

from conserve import identity
from conserve.clock import unix_s
from conserve.histories.kinship import scope_for, scope_of
from conserve.histories.prefixes import mark
from conserve.history import History
from conserve.recognition import Digest, TailIndex
from conserve.turn import TurnKey, TurnStats


class Parked(NamedTuple):
    """Tokens that host memory had of a history, from its beginning on, at a Unix time."""

    id: str
    incarnation: int
    tokens: int
    at_s: float


class Holdings:
    def __init__(self) -> None:
        self._held: dict[str, History] = {}
        self._stored_tokens: dict[str, int] = {}
        self._parked: dict[str, Parked] = {}
        self._continued_by = TailIndex()
        # Histories that the table has taken back, and the table's running turn that may undo that.
        self._given_up: dict[str, int | None] = {}

    def all(self) -> list[History]:
        return [copy.copy(history) for history in self._held.values()]

    def parked(self) -> list[Parked]:
        return list(self._parked.values())

    def begin(
        self, turn: TurnKey, root: Digest | None = None, points: bytes = b"", look_up: bool = False
    ) -> None:
        """Note that a turn arrives; ``root`` and ``points`` are its history's, if that begins here.

        ``look_up``: LMCache may have more of it than is known here, since it was computed
        elsewhere.
        """
        if look_up:
            self._stored_tokens.pop(turn.history_id, None)
        held = self._held.get(turn.history_id)
        if held is not None and held.incarnation != turn.incarnation:
            self.drop(held.id, held.incarnation)
            held = None
        if held is None:
            now_s = unix_s()
            held = History(turn.history_id, turn.incarnation, now_s, now_s)
            held.root, held.points = root, points
            self._held[turn.history_id] = held
            self._stored_tokens.pop(turn.history_id, None)
            if not look_up:
                self._stored_tokens[turn.history_id] = 0
        elif held.id in self._given_up:
            self._given_up[held.id] = turn.turn_id
        held.running += (turn.turn_id,)
        held.last_used_s = unix_s()

    def finish(
        self,
        turn: TurnKey,
        stats: TurnStats | None,
        tails: tuple[Digest, ...],
        completed: bool,
        parked: bool = False,
    ) -> None:
        """Note that a turn has ended; ``stats`` is None if the engine did nothing for it."""
        held = self._held.get(turn.history_id)
        if held is None or held.incarnation != turn.incarnation:
            return
        held.running = tuple(id for id in held.running if id != turn.turn_id)
        # A table rebuilt from this then ignores further reports of the turn.
        held.finished = max(held.finished, turn.turn_id)
        held.last_used_s = unix_s()
        if stats is not None:
            held.held_tokens = stats.prompt_tokens + stats.output_tokens
            held.last_turn = stats
            held.tool = stats.tool
            if parked:
                self._stored_tokens[turn.history_id] = stats.prompt_tokens
            self._stored_tokens.setdefault(turn.history_id, stats.prompt_tokens)
            self._note_parked(held, stats, parked)
        if completed:
            held.turns += 1
            if tails and stats is not None:
                self._continued_by.discard(held.id, _keys(held))
                held.set_tails(tails, stats)
                self._continued_by.add(held.id, _keys(held))
            # A completion has no tails.
            newest = held.root is None or tails
            if newest and stats is not None and self._given_up.get(held.id) == turn.turn_id:
                del self._given_up[held.id]
        if not held.has_last_turn and not held.running:
            self.drop(turn.history_id, turn.incarnation)

    def drop(self, history_id: str, incarnation: int) -> None:
        """Drop a history that ended, or lives elsewhere. A later one of the same id stays."""
        held = self._held.get(history_id)
        if held is not None and held.incarnation == incarnation:
            del self._held[history_id]
            self._continued_by.discard(held.id, _keys(held))
            self._given_up.pop(history_id, None)
            self._stored_tokens.pop(history_id, None)
            self._parked.pop(history_id, None)

    def give_up(self, history_id: str, incarnation: int) -> None:
        """Note that the table has taken a history back, so that its record here may be outdated.

        That lasts until a turn that the table has sent ends.
        """
        held = self._held.get(history_id)
        if held is not None and held.incarnation == incarnation:
            self._given_up[history_id] = None

    def continued(self, root: Digest, end: Digest, conversation_id: str | None) -> History | None:
        """Return the idle history whose newest answer a turn follows, or None.

        None as well where others had the same answers: the table may just have chosen that history
        for another client's turn. `conserve.direct.Continued` says what the arguments are.
        """
        if not end:
            return None if conversation_id is None else self._completions_of(conversation_id)
        found = self._continued_by.only(root + mark(end) + scope_for(conversation_id))
        if found is None or found in self._given_up or self._held[found].running:
            return None
        # A client may state an id that was generated for it.
        stated = conversation_id is not None and identity.is_generated(conversation_id)
        others = stated and identity.conversation_of(found) != conversation_id
        return None if others else self._held[found]

    def _completions_of(self, conversation_id: str) -> History | None:
        # It has an id of its own if the conversation has chats, too.
        for history_id in (identity.further(conversation_id, 0), conversation_id):
            held = self._held.get(history_id)
            if held is not None and held.root is None and not held.tails:
                idle = held.has_last_turn and not held.running and held.id not in self._given_up
                return held if idle else None
        return None

    def _note_parked(self, held: History, stats: TurnStats, parked: bool) -> None:
        known = self._parked.get(held.id)
        tokens = 0 if known is None else known.tokens
        if stats.lmcache_tokens:
            # A prefiller or another decoder may have left it there.
            tokens = max(tokens, stats.found_tokens)
        found = stats.parked_after(tokens, parked)
        if found:
            used_s = held.last_used_s
            self._parked[held.id] = Parked(held.id, held.incarnation, found, used_s)
        elif found == 0:
            self._parked.pop(held.id, None)

    def held_tokens(self, history_id: str) -> int:
        held = self._held.get(history_id)
        return 0 if held is None else held.held_tokens

    def stored_tokens(self, history_id: str) -> int | None:
        """Return how much of a history LMCache may have; None if unknown."""
        return self._stored_tokens.get(history_id)


def _keys(held: History) -> list[bytes]:
    """Return what turns that continue a history begin with; nothing for completions."""
    if held.root is None:
        return []
    return [held.root + tail + scope_of(held) for tail in held.tails]
