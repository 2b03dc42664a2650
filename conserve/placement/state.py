"""The state that a placement policy reads, what it decides, and the seat that it sits in.

A policy reads observed state alone (a first turn's length in tokens, engines' loads) and
returns a decision. It knows neither Ray nor vLLM nor a clock, so the live system, a simulator
and the tests run the same class, and a baseline is another class in the same seat.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Decoder:
    """A decoder as the policy sees it.

    Attributes:
        held_tokens: for live conversations, those promised included.
        kept_tokens: of its capacity, what nothing new is promised.
    """

    id: str
    capacity_tokens: int
    held_tokens: int = 0
    conversations: int = 0
    kept_tokens: int = 0

    @property
    def occupancy(self) -> float:
        """Tokens held for live conversations, as a share of the capacity."""
        return self.held_tokens / self.capacity_tokens

    @property
    def free_tokens(self) -> int:
        """So many more may be promised; negative where more are held than should be."""
        return self.capacity_tokens - self.kept_tokens - self.held_tokens

    def has_room(self, tokens: int) -> bool:
        """Whether ``tokens`` more fit. An empty decoder takes what it is given."""
        return tokens <= self.free_tokens or self.conversations == 0


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


@dataclass(frozen=True, slots=True)
class Shared:
    """Tells what decoders hold of a prompt already, as the beginning of other histories.

    Attributes:
        tokens: by decoder; only those that hold any.
        warm_on: the decoder that holds the history which the prompt goes back into, or its
            conversation's others; None where it has nothing but a system part in common.
        coming_to: the decoder to which what it goes back into is yet to come: it is promised there,
            and computed elsewhere.
        left_on: the decoder that a paused history was on, if that should have its KV still. It is
            not counted there any more.
        left_tokens: so many the history had there.
        parked_tokens: so many of the history host memory has, for any decoder to take.
    """

    tokens: Mapping[str, int]
    warm_on: str | None = None
    coming_to: str | None = None
    left_on: str | None = None
    left_tokens: int = 0
    parked_tokens: int = 0

    def beyond(self, tokens: int, decoder_id: str) -> int:
        """Return how much of a prompt of so many tokens a decoder does not hold yet."""
        return max(0, tokens - self.tokens.get(decoder_id, 0))

    def there(self, engine_id: str) -> int:
        """Return how much of a prompt an engine has computed and should have yet."""
        tokens = self.tokens.get(engine_id, 0)
        if engine_id == self.coming_to and engine_id != self.warm_on:
            tokens = 0
        return max(tokens, self.left_tokens) if engine_id == self.left_on else tokens

    def found(self, decoder_id: str) -> int:
        """Return how much of a prompt a decoder has, or gets from host memory, and does not
        compute.
        """
        return max(self.there(decoder_id), self.parked_tokens)


NOTHING_SHARED = Shared({})


@dataclass(frozen=True, slots=True)
class Appended:
    """A turn of a conversation that is bound, whose prompt's length is known.

    Attributes:
        decoder_id: where its history lives.
        tokens: the whole prompt's.
        held_tokens: what of it that decoder has computed already.
        parked_tokens: what of it host memory has, for any engine to take.
    """

    decoder_id: str
    tokens: int
    held_tokens: int
    parked_tokens: int


class PlacementPolicy(Protocol):
    """The seat of a placement policy."""

    def place(
        self,
        prompt_tokens: int,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        """Decide for a history that is bound to no decoder.

        Args:
            prompt_tokens: length of its prompt, in tokens of the served model.
            decoders: those alive; ties go to the one listed first.
            prefillers: those alive; may be empty.
            shared: what of the prompt decoders hold already.
            now_s: the time, for policies that know what was some time ago.

        Returns:
            The decision, or None while no decoder has room.
        """
        ...

    def prefill_later_turn(
        self,
        prefillers: Iterable[Prefiller],
        appended: Appended | None = None,
        now_s: float = 0.0,
    ) -> str | None:
        """Decide for a turn of a conversation that is bound to a decoder.

        Args:
            prefillers: those alive; may be empty.
            appended: how much there is to prefill, where that is known; None: it is not.
            now_s: the time, for policies that know what was some time ago.

        Returns:
            Id of the prefiller that is to run the turn's prefill, or None: its decoder does.
        """
        ...


def emptiest_decoder(
    prompt_tokens: int, decoders: Iterable[Decoder], shared: Shared = NOTHING_SHARED
) -> Decoder | None:
    """Return the decoder with room and the lowest occupancy, then the fewest conversations."""
    best: Decoder | None = None
    least = (0.0, 0)
    nothing_shared = not shared.tokens
    for decoder in decoders:
        tokens = prompt_tokens if nothing_shared else shared.beyond(prompt_tokens, decoder.id)
        if not decoder.has_room(tokens):
            continue
        emptiness = (decoder.occupancy, decoder.conversations)
        if best is None or emptiness < least:
            best, least = decoder, emptiness
    return best


def shortest_queue(prefillers: Iterable[Prefiller]) -> str | None:
    """Id of the prefiller with the fewest tokens still to prefill, or None without any."""
    best: Prefiller | None = None
    for prefiller in prefillers:
        if best is None or prefiller.queued_tokens < best.queued_tokens:
            best = prefiller
    return None if best is None else best.id
