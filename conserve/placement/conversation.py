"""ConServe's own policy: one decision a conversation."""

from collections.abc import Iterable
from dataclasses import dataclass

from conserve.placement.state import (
    Decoder,
    Placement,
    Prefiller,
    emptiest_decoder,
    shortest_queue,
)


@dataclass(frozen=True, slots=True)
class ConversationPlacement:
    """One decision a conversation, from what can be observed (ConServe, section 4.2).

    *Decoder*: the one with the lowest KV occupancy, in tokens held by live conversations,
    counting those promised and not yet arrived, against its capacity; among equals the one with
    fewer conversations.
    *Prefiller*: the one with the fewest tokens still to prefill, for the first turn. Every later
    turn's prefill runs on the decoder.

    It ignores on purpose how long the conversation may get, what it will call and how busy a
    decoder's batch is: none of that can be known, and the pool is provisioned for it instead.

    Settings:
        min_remote_prefill_tokens: a shorter first turn is prefilled by its decoder. 0 (the
            default, as in the paper): every first turn goes to a prefiller.

    Example:
        >>> policy = ConversationPlacement()
        >>> policy.place(900, [Decoder("d1", 8000, 5000, 2), Decoder("d2", 8000, 100, 1)],
        ...              [Prefiller("p1")])
        Placement(decoder_id='d2', prefiller_id='p1')
    """

    min_remote_prefill_tokens: int = 0

    def place(
        self, turn1_tokens: int, decoders: Iterable[Decoder], prefillers: Iterable[Prefiller]
    ) -> Placement | None:
        decoder = emptiest_decoder(turn1_tokens, decoders)
        if decoder is None:
            return None
        remote = turn1_tokens >= self.min_remote_prefill_tokens
        return Placement(decoder.id, shortest_queue(prefillers) if remote else None)

    def prefill_later_turn(self, prefillers: Iterable[Prefiller]) -> str | None:
        return None
