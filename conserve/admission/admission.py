"""Binding conversations to decoders as they come, or when there is room for them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from conserve import identity
from conserve.admission.ticket import LineOrder, Ticket
from conserve.admission.waiting import WaitingLine
from conserve.admission.window import Pressure, Window
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.history import History, TurnKey
from conserve.placement import Placement


def attained_service(histories: Iterable[History]) -> int:
    """Return what has been computed for a conversation, each token once, in tokens.

    That is what its histories have grown to, prompts and outputs, less what they begin with as
    others do. What is computed again because its room was given away is no service that it asked
    for: counted, it would send whoever was paused to the end of the line, to be paused again. It
    needs no counter, so it outlives the table as the histories themselves do. (Autellix counts
    seconds on the GPU; these follow from tokens.)

    Args:
        histories: its live ones.

    Example:
        >>> from conserve.history import TurnStats
        >>> chat = History("c", 1, created_s=0.0, last_used_s=0.0)
        >>> attained_service([chat])
        0
        >>> chat.last_turn = TurnStats(900, 100, decoder_cached_tokens=0, lmcache_tokens=0)
        >>> attained_service([chat])
        1000
    """
    served = 0
    for one in histories:
        last = one.last_turn
        if last is not None:
            shared_tokens = 0 if one.base is None else one.base.tokens
            served += max(0, last.prompt_tokens + last.output_tokens - shared_tokens)
    return served


# To see whether room can be made for a prompt may take a look at all idle histories: so many are
# tried in vain at a time, from the first on.
_TRIED = 8
# While less of decoders' KV is held, nothing of it is dropped for want of room: what is computed
# again there was lost otherwise, with a decoder, say, or was no whole block.
_PRESSED = 0.5

Why = Literal["room", "window", "order"]
"""Why somebody waits: no decoder has ``room`` for it; as many are at work as the ``window`` lets;
others go before, by the ``order``."""
WHYS: tuple[Why, ...] = get_args(Why)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A conversation that goes to a decoder.

    Attributes:
        turn: the turn of it that has begun with that.
        prompt_tokens: the prompt's length that was asked for.
        newly_bound: False where it was bound already: the decoder that was taken for lost is back,
            and has its KV.
        known: whether it had been bound before.
        moved: whether that was to another decoder, as far as is known.
    """

    history: History
    turn: TurnKey
    prompt_tokens: int
    placement: Placement
    newly_bound: bool = True
    known: bool = False
    moved: bool = False


class Admission:
    """Binds conversations to decoders; those for which there is no room wait in line.

    The line's order says who goes first, and whether those behind who fit may overtake meanwhile;
    by default nobody may. Nothing here waits: the caller asks `admit` again whenever room may have
    come free, and calls `leave` when somebody has waited for too long.

    Args:
        table: where conversations are bound, by its placement policy.
        limit: places in the line; 0 means that nobody may wait.
        timeout_s: the longest wait, for `Ticket.deadline_s`; whoever drives this keeps it.
        order: of the line; by default `FirstCome`.
        window: how many histories may be at work; None: as many as there is room for. Who has
            waited for five sixths of the time passes it: it makes wait, and turns nobody away.

    Attributes:
        line: those who wait.
        window: as given.

    Example:
        >>> from conserve.placement import ConversationPlacement
        >>> table = ConversationTable(ConversationPlacement(), idle_timeout_s=60)
        >>> table.add_decoder("d1", 1000)
        []
        >>> admission = Admission(table, limit=8, timeout_s=60)
        >>> admission.enter("a", 800, now_s=0.0).placement.decoder_id
        'd1'
        >>> admission.enter("b", 800, now_s=1.0).deadline_s  # It waits.
        61.0
        >>> _ = table.release("a")
        >>> [admitted.history.id for admitted in admission.admit(2.0)]
        ['b']
    """

    def __init__(
        self,
        table: ConversationTable,
        limit: int,
        timeout_s: float,
        order: LineOrder | None = None,
        window: Window | None = None,
    ) -> None:
        self._table = table
        self.line = WaitingLine(limit, timeout_s, order)
        self.window = window
        self._patience_s = timeout_s * 5 / 6
        self._counted = (0, 0)

    def observe(self, now_s: float, cpu_pressure: float = 0.0) -> bool:
        """Look at what presses, as often as the window wants to.

        Args:
            cpu_pressure: of the machine that tools run on, from 0 to 1; 0 where none do.

        Returns:
            Whether the window has changed. If so, ask `admit`.
        """
        window = self.window
        if window is None or not window.is_due(now_s):
            return False
        table = self._table
        expected = table.expected_cached_tokens + table.recomputed_tokens
        again = table.missing_cached_tokens + table.recomputed_tokens
        before, self._counted = self._counted, (expected, again)
        kv = (again - before[1]) / max(1, expected - before[0])
        if self._held_share() < _PRESSED:
            # It was not dropped for want of room.
            kv = 0.0
        was = window.limit
        window.observe(now_s, table.active(now_s), Pressure(kv, cpu_pressure))
        return window.limit != was

    def _held_share(self) -> float:
        decoders = self._table.decoders.values()
        capacity_tokens = sum(one.capacity_tokens for one in decoders)
        return sum(one.held_tokens for one in decoders) / max(1, capacity_tokens)

    def enter(
        self,
        history_id: str,
        prompt_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
    ) -> Admitted | Ticket:
        """Bind a conversation that is bound nowhere, or have it wait.

        Args:
            prompt_tokens: the prompt's length.
            arrived_s: when its first request came, if that was before now.
            opening: what else is known of its prompt.

        Returns:
            Where it goes, or its place in the line.

        Raises:
            QueueFull: there is neither room at a decoder nor a place in the line.
            ValueError: the conversation waits already.
        """
        arrived_s = now_s if arrived_s is None else arrived_s
        if not self.line and self._has_slot(now_s, now_s):
            admitted = self._bind(history_id, prompt_tokens, now_s, arrived_s, opening)
            if admitted is not None:
                return admitted
        histories = self._table.histories(identity.conversation_of(history_id))
        served_tokens = attained_service(histories)
        others_wait = bool(self.line)
        ticket = self.line.join(history_id, prompt_tokens, now_s, arrived_s, opening, served_tokens)
        # Those before it were tried when somebody went, and did not fit.
        if others_wait and any(one is ticket for one in self._candidates(now_s)):
            return self._let_go(ticket, now_s) or ticket
        return ticket

    def admit(self, now_s: float) -> list[Admitted]:
        """Bind those for whom there is room by now, in their order; they have left the line."""
        admitted: list[Admitted] = []
        tried: set[str] = set()
        while (one := self._next(now_s, tried)) is not None:
            admitted.append(one)
        return admitted

    def leave(self, history_id: str) -> Ticket | None:
        """Give a conversation's place up; None if it has none. The next may fit: see `admit`."""
        return self.line.leave(history_id)

    def waiting(self, now_s: float) -> Iterator[tuple[Ticket, Why]]:
        """Return those who wait, who goes first first, and why each does."""
        tried = len(self._candidates(now_s))
        for ahead, ticket in enumerate(self.line.tickets(now_s)):
            if ahead >= tried:
                yield ticket, "order"
            else:
                yield ticket, "room" if self._has_slot(now_s, ticket.joined_s) else "window"

    def ahead(self, history_id: str, now_s: float) -> tuple[int, Why]:
        """How many go before one that waits, as things are, and why it does wait.

        Raises:
            KeyError: it does not wait.
        """
        for ahead, (ticket, why) in enumerate(self.waiting(now_s)):
            if ticket.history_id == history_id:
                return ahead, why
        raise KeyError(history_id)

    def active(self, now_s: float) -> int:
        """How many histories are at work, as the window counts them."""
        return self._table.active(now_s)

    def _candidates(self, now_s: float) -> list[Ticket]:
        """Yield those who may go if they fit, who goes first first."""
        candidates: list[Ticket] = []
        for ticket in self.line.tickets(now_s):
            candidates.append(ticket)
            if len(candidates) == _TRIED or self.line.holds_up(ticket, now_s):
                break
        return candidates

    def _next(self, now_s: float, tried: set[str]) -> Admitted | None:
        """The first who fits.

        Args:
            tried: did not fit before, and are not looked at; those that do not are added.
        """
        for ticket in self._candidates(now_s):
            if ticket.history_id in tried:
                continue
            admitted = self._let_go(ticket, now_s)
            if admitted is not None:
                return admitted
            tried.add(ticket.history_id)
        return None

    def _let_go(self, ticket: Ticket, now_s: float) -> Admitted | None:
        """Bind one of the line, if there is room for it; it has left the line then."""
        if not self._has_slot(now_s, ticket.joined_s):
            return None
        admitted = self._bind(
            ticket.history_id, ticket.prompt_tokens, now_s, ticket.arrived_s, ticket.opening
        )
        if admitted is not None:
            self.line.leave(ticket.history_id, went=True)
        return admitted

    def _has_slot(self, now_s: float, joined_s: float) -> bool:
        """Whether the window lets one more go, who has waited since then."""
        if self.window is None or now_s - joined_s >= self._patience_s:
            return True
        return self._table.active(now_s) < self.window.limit

    def _bind(
        self,
        history_id: str,
        prompt_tokens: int,
        now_s: float,
        arrived_s: float,
        opening: Opening | None,
    ) -> Admitted | None:
        known = self._table.begin(history_id, now_s)
        if known is not None and known.decoder_id is not None:
            where = Placement(known.decoder_id, None)
            return Admitted(known, known.newest_turn, prompt_tokens, where, newly_bound=False)
        before = self._table.get(history_id)
        moves = 0 if before is None else before.moves
        placement = self._table.bind(history_id, prompt_tokens, now_s, arrived_s, opening)
        if placement is None:
            return None
        history = self._table.get(history_id)
        assert history is not None
        return Admitted(
            history,
            history.newest_turn,
            prompt_tokens,
            placement,
            known=before is not None,
            moved=history.moves > moves,
        )
