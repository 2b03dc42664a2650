"""Accounts for the use of simulated decoders' KV space over time."""

import math
from collections.abc import Mapping

from conserve.conversations import ConversationTable
from conserve.costs import TERMS, SpaceTimeCosts
from conserve.history import TurnKey, TurnStats


class KvUse:
    """Has the costs counted of the decoders of a table; the class is the live system's.

    Args:
        capacity_tokens: of each decoder, by its id.
    """

    def __init__(self, table: ConversationTable, capacity_tokens: Mapping[str, int]) -> None:
        self._table = table
        self._costs = SpaceTimeCosts()
        for decoder_id, tokens in capacity_tokens.items():
            self._costs.add(decoder_id, tokens, 0.0)

    def look(self, now_s: float) -> None:
        """Something was bound, released or paused."""
        for decoder_id, decoder in self._table.decoders.items():
            self._costs.look(decoder_id, decoder.held_tokens, now_s)

    def begin(self, turn: TurnKey, now_s: float) -> None:
        """A turn has begun, by the table."""
        history = self._table.get(turn.history_id)
        assert history is not None
        assert history.decoder_id is not None
        self.look(now_s)
        tokens, had_tokens = history.held_tokens, history.last_tokens
        self._costs.begin(turn, history.decoder_id, tokens, had_tokens, now_s)

    def prefilled(self, turn: TurnKey, computed_tokens: int) -> None:
        """A prefiller has computed so much for a turn."""
        self._costs.prefilled(turn, computed_tokens)

    def end(self, turn: TurnKey, stats: TurnStats, now_s: float) -> None:
        """A turn has ended; the table has still to be told."""
        self._costs.end(turn, stats, now_s)

    def shares(self, now_s: float) -> dict[str, float]:
        """Return each term's share of all decoders' KV space until now; empty of no time."""
        self.look(now_s)
        of_decoders = [self._costs.terms(decoder_id) for decoder_id in self._costs.decoders]
        total = math.fsum(math.fsum(terms.values()) for terms in of_decoders)
        if not total:
            return {}
        return {term: math.fsum(one[term] for one in of_decoders) / total for term in TERMS}
