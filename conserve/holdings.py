"""What a decoder holds: its own account of the conversations bound to it.

The conversation table is rebuilt from these after its loss, so a decoder keeps, beside the KV,
what is needed to go on: the id, the tokens, and the digests that recognise the next turn.
"""

import copy

from conserve.clock import unix_s
from conserve.conversation import Conversation, TurnKey, TurnStats
from conserve.recognition import Digest


class Holdings:
    """Conversations on one decoder, by id."""

    def __init__(self) -> None:
        self._held: dict[str, Conversation] = {}
        self._stored_tokens: dict[str, int] = {}

    def all(self) -> list[Conversation]:
        """A copy of every record."""
        return [copy.copy(conversation) for conversation in self._held.values()]

    def begin(
        self,
        turn: TurnKey,
        root: Digest | None = None,
        points: bytes = b"",
        look_up: bool = False,
    ) -> None:
        """Note that a turn arrives.

        Args:
            root, points: of its history, if that begins here; see `Conversation`.
            look_up: LMCache may have more of it than is known here: a prefiller has stored its
                prompt, or it was elsewhere since.
        """
        if look_up:
            self._stored_tokens.pop(turn.conversation_id, None)
        held = self._held.get(turn.conversation_id)
        if held is None or held.incarnation != turn.incarnation:
            now_s = unix_s()
            held = Conversation(turn.conversation_id, turn.incarnation, now_s, now_s)
            held.root, held.points = root, points
            self._held[turn.conversation_id] = held
            self._stored_tokens.pop(turn.conversation_id, None)
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
        """Note that a turn has ended.

        Args:
            stats: None: the engine did nothing for it.
            parked: it was to leave its prompt's KV in host memory.
        """
        held = self._held.get(turn.conversation_id)
        if held is None or held.incarnation != turn.incarnation:
            return
        held.running = tuple(id for id in held.running if id != turn.turn_id)
        # So that a table rebuilt from this refuses what it is told of the turn again.
        held.finished = max(held.finished, turn.turn_id)
        held.last_used_s = unix_s()
        if stats is not None:
            held.held_tokens = stats.prompt_tokens + stats.output_tokens
            held.last_turn = stats
            held.tool = stats.tool
            if parked:
                self._stored_tokens[turn.conversation_id] = stats.prompt_tokens
            self._stored_tokens.setdefault(turn.conversation_id, stats.prompt_tokens)
        if completed:
            held.turns += 1
            if tails and stats is not None:
                held.set_tails(tails, stats)
        if not held.has_last_turn and not held.running:
            self.drop(turn.conversation_id, turn.incarnation)

    def drop(self, conversation_id: str, incarnation: int) -> None:
        """Drop a conversation that ended, or lives elsewhere. A later one of the same id stays."""
        held = self._held.get(conversation_id)
        if held is not None and held.incarnation == incarnation:
            del self._held[conversation_id]
            self._stored_tokens.pop(conversation_id, None)

    def stored_tokens(self, conversation_id: str) -> int | None:
        """How much of it LMCache may have, in tokens; None: that is not known.

        It is the prompt with which it came here, the last time, or a later one that was parked.
        """
        return self._stored_tokens.get(conversation_id)
