"""Binding conversations to decoders as they come, or when there is room for them."""

from dataclasses import dataclass

from conserve.admission.waiting import Ticket, WaitingLine
from conserve.conversation import Conversation, TurnKey
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.placement import Placement


@dataclass(frozen=True, slots=True)
class Admitted:
    """A conversation that goes to a decoder.

    Attributes:
        turn: the turn of it that has begun with that.
        turn1_tokens: the prompt's length that was asked for.
        newly_bound: False where it was bound already: the decoder that was taken for lost is back,
            and has its KV.
        known: whether it had been bound before.
        moved: whether that was to another decoder, as far as is known.
    """

    conversation: Conversation
    turn: TurnKey
    turn1_tokens: int
    placement: Placement
    newly_bound: bool = True
    known: bool = False
    moved: bool = False


class Admission:
    """Binds conversations to decoders; those for which there is no room wait in line.

    Nobody overtakes: while there is a line, whoever comes takes its last place, and the head goes
    first, however small the others are. Nothing here waits: the caller asks `admit` again whenever
    room may have come free, and calls `leave` when somebody has waited for too long.

    Args:
        table: where conversations are bound, by its placement policy.
        limit: places in the line; 0 means that nobody may wait.
        timeout_s: the longest wait, for `Ticket.deadline_s`; whoever drives this keeps it.

    Attributes:
        line: those who wait.

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
        >>> [admitted.conversation.id for admitted in admission.admit(2.0)]
        ['b']
    """

    def __init__(self, table: ConversationTable, limit: int, timeout_s: float) -> None:
        self._table = table
        self.line = WaitingLine(limit, timeout_s)

    def enter(
        self,
        conversation_id: str,
        turn1_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
    ) -> Admitted | Ticket:
        """Bind a conversation that is bound nowhere, or have it wait.

        Args:
            turn1_tokens: the prompt's length.
            arrived_s: when its first request came, if that was before now.
            opening: what else is known of its prompt.

        Returns:
            Where it goes, or the last place in the line.

        Raises:
            QueueFull: there is neither room at a decoder nor a place in the line.
            ValueError: the conversation waits already.
        """
        arrived_s = now_s if arrived_s is None else arrived_s
        if not self.line:
            admitted = self._bind(conversation_id, turn1_tokens, now_s, arrived_s, opening)
            if admitted is not None:
                return admitted
        return self.line.join(conversation_id, turn1_tokens, now_s, arrived_s, opening)

    def admit(self, now_s: float) -> list[Admitted]:
        """Bind those for whom there is room by now, in their order; they have left the line."""
        admitted = []
        while (head := self.line.head()) is not None:
            one = self._bind(head.key, head.tokens, now_s, head.arrived_s, head.opening)
            if one is None:
                break
            self.line.leave(head.key)
            admitted.append(one)
        return admitted

    def leave(self, conversation_id: str) -> Ticket | None:
        """Give a conversation's place up; None if it has none. The next may fit: see `admit`."""
        return self.line.leave(conversation_id)

    def _bind(
        self,
        conversation_id: str,
        turn1_tokens: int,
        now_s: float,
        arrived_s: float,
        opening: Opening | None,
    ) -> Admitted | None:
        known = self._table.begin(conversation_id, now_s)
        if known is not None and known.decoder_id is not None:
            where = Placement(known.decoder_id, None)
            return Admitted(known, known.newest_turn, turn1_tokens, where, newly_bound=False)
        before = self._table.get(conversation_id)
        moves = 0 if before is None else before.moves
        placement = self._table.bind(conversation_id, turn1_tokens, now_s, arrived_s, opening)
        if placement is None:
            return None
        conversation = self._table.get(conversation_id)
        assert conversation is not None
        return Admitted(
            conversation,
            conversation.newest_turn,
            turn1_tokens,
            placement,
            known=before is not None,
            moved=conversation.moves > moves,
        )
