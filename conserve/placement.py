"""Where a conversation goes: the placement policy, and what it may read.

A policy reads observed state alone (a first turn's length in tokens, engines' loads) and
returns a decision. It knows neither Ray nor vLLM nor a clock, so the live system, a simulator
and the tests run the same class, and a baseline is another class in the same seat.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Decoder:
    """A decoder as the policy sees it. ``held_tokens`` counts promised conversations too."""

    id: str
    capacity_tokens: int
    held_tokens: int = 0
    conversations: int = 0

    @property
    def occupancy(self) -> float:
        """Tokens held for live conversations, as a share of the capacity."""
        return self.held_tokens / self.capacity_tokens

    def has_room(self, tokens: int) -> bool:
        """Whether ``tokens`` more fit. An empty decoder takes what it is given."""
        return self.held_tokens + tokens <= self.capacity_tokens or self.conversations == 0


@dataclass(slots=True)
class Prefiller:
    """A prefiller as the policy sees it: tokens of prefills sent to it and not yet done."""

    id: str
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision: the decoder for the conversation's life, the prefiller for its first turn.

    ``prefiller_id`` is None where the decoder is to prefill by itself.
    """

    decoder_id: str
    prefiller_id: str | None


class PlacementPolicy(Protocol):
    """The seat of a placement policy."""

    def place(
        self, turn1_tokens: int, decoders: Iterable[Decoder], prefillers: Iterable[Prefiller]
    ) -> Placement | None:
        """Decide for a conversation that is bound to no decoder.

        Args:
            turn1_tokens: length of its prompt, in tokens of the served model.
            decoders: those alive; ties go to the one listed first.
            prefillers: those alive; may be empty.

        Returns:
            The decision, or None while no decoder has room.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConversationPlacement:
    """One decision a conversation, from what can be observed (ConServe, section 4.2).

    *Decoder*: the one with the lowest KV occupancy, in tokens held by live conversations,
    counting those promised and not yet arrived, against its capacity; among equals the one with
    fewer conversations.
    *Prefiller*: the one with the fewest tokens still to prefill.

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
        best: Decoder | None = None
        for decoder in decoders:
            if not decoder.has_room(turn1_tokens):
                continue
            if best is None or _emptiness(decoder) < _emptiness(best):
                best = decoder
        if best is None:
            return None
        prefiller: Prefiller | None = None
        if turn1_tokens >= self.min_remote_prefill_tokens:
            for candidate in prefillers:
                if prefiller is None or candidate.queued_tokens < prefiller.queued_tokens:
                    prefiller = candidate
        return Placement(best.id, prefiller.id if prefiller else None)


def _emptiness(decoder: Decoder) -> tuple[float, int]:
    return decoder.occupancy, decoder.conversations
