"""The base class of placement policies, the ConServe paper's, and its baselines (section 5.1).

The paper's makes one decision a conversation."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from conserve.placement.load import Loads
from conserve.placement.state import (
    NOTHING_SHARED,
    Coming,
    Decoder,
    Placement,
    Prefiller,
    Shared,
    emptiest_decoder,
    shortest_queue,
)

# A prompt of which a greater share is held nowhere does not start warm: its prefill would hold up
# the decoder's decodes. Nor does one on a decoder whose occupancy is above the emptiest's by more.
_MOST_COLD_SHARE, _MOST_UNEVEN = 0.5, 0.5


class PlacementPolicy(ABC):
    """A placement policy: it reads observed state and knows no clock.

    Attributes:
        uses_prefillers: whether any prompt is sent to a prefiller.
        hosts_prefillers: whether conversations are bound to prefillers, too.
        only_first_prompts: whether prefillers get all first prompts and nothing else.
        keeps_later_turns: whether a bound history's turn may run on its decoder without asking.
        prefills_later_turns: whether prefillers continue histories, read from host memory.
        moves_turns: whether each turn goes where it costs least (`turn_costs`), while host memory
            keeps histories.
        pauses: whether idle histories may be paused.
        loads: what is known of engines' work; None if the policy does not ask.
    """

    __slots__ = ()

    uses_prefillers: ClassVar[bool] = True
    hosts_prefillers: ClassVar[bool] = False
    only_first_prompts: ClassVar[bool] = False
    keeps_later_turns: ClassVar[bool] = False
    prefills_later_turns: ClassVar[bool] = False
    moves_turns: ClassVar[bool] = False
    pauses: ClassVar[bool] = False
    loads: Loads | None = None

    @abstractmethod
    def place(
        self,
        prompt_tokens: int,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        """Place a history that is bound to no decoder; None while no decoder has room.

        Ties go to the decoder listed first.
        """

    def turn_costs(
        self, prompt_tokens: int, decoders: Iterable[Decoder], shared: Shared, now_s: float
    ) -> dict[str, tuple[float, Coming | None]]:
        """Return what one turn costs at each decoder, in seconds, and what it would wait for.

        All that it delays is included.
        """
        return {}

    def prefill_later_turn(self, prefillers: Iterable[Prefiller]) -> str | None:
        """Return the prefiller of a bound history's turn; None means its decoder."""
        return None

    def homes(
        self, decoders: Iterable[Decoder], prefillers: Iterable[Prefiller], now_s: float
    ) -> list[Decoder]:
        """Return the decoders that new conversations may go to, with or without room."""
        return list(decoders)


@dataclass(frozen=True, slots=True)
class ConversationPlacement(PlacementPolicy):
    """One decision a conversation, from what can be observed (ConServe, section 4.2).

    The decoder is the one with the lowest KV occupancy, promised tokens included. The first turn's
    prefiller is the one with the fewest tokens still to prefill; later turns' prefills run on the
    decoder. A prompt starts *warm* on the decoder that holds most of it, without a prefiller; a
    paused history goes back to the decoder that should still have it. See README.md.
    """

    only_first_prompts = True
    keeps_later_turns = True
    pauses = True

    min_remote_prefill_tokens: int = 0

    def place(
        self,
        prompt_tokens: int,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        decoder = None
        if shared.left_on is not None:
            decoders = tuple(decoders)
            cold_tokens = prompt_tokens - shared.left_tokens
            decoder = self._near(prompt_tokens, decoders, shared, shared.left_on, cold_tokens)
            if decoder is not None:
                return Placement(decoder.id, None)
        if self._comes_from_host(prompt_tokens, shared):
            decoder = emptiest_decoder(prompt_tokens, decoders, shared)
            return None if decoder is None else Placement(decoder.id, None)
        if shared.tokens:
            decoders = tuple(decoders)
            decoder = self._near(prompt_tokens, decoders, shared, shared.warm_on)
            if decoder is not None:
                return Placement(decoder.id, None)
            decoder = self._near(prompt_tokens, decoders, shared, shared.coming_to)
        if decoder is None:
            decoder = emptiest_decoder(prompt_tokens, decoders, shared)
        if decoder is None:
            return None
        remote = self.uses_prefillers and prompt_tokens >= self.min_remote_prefill_tokens
        return Placement(decoder.id, shortest_queue(prefillers) if remote else None)

    def _comes_from_host(self, prompt_tokens: int, shared: Shared) -> bool:
        """Return whether host memory has most of a prompt, and more than any decoder."""
        if shared.parked_tokens <= shared.tokens.get(shared.warm_on or "", 0):
            return False
        return shared.parked_tokens >= (1 - _MOST_COLD_SHARE) * prompt_tokens

    def _near(
        self,
        prompt_tokens: int,
        decoders: Iterable[Decoder],
        shared: Shared,
        holder_id: str | None,
        cold_tokens: int | None = None,
    ) -> Decoder | None:
        """Return the decoder that has a prompt's beginning, if the prompt should go there."""
        holder = next((one for one in decoders if one.id == holder_id), None)
        if holder is None:
            return None
        if holder.occupancy > _MOST_UNEVEN + min(one.occupancy for one in decoders):
            return None
        new_tokens = shared.beyond(prompt_tokens, holder.id)
        if cold_tokens is None:
            cold_tokens = new_tokens
        fits = cold_tokens <= _MOST_COLD_SHARE * prompt_tokens and holder.has_room(new_tokens)
        return holder if fits else None


@dataclass(frozen=True, slots=True)
class CollocatedPlacement(ConversationPlacement):
    """`ConversationPlacement` without prefillers (ConServe, section 5.1).

    As in the paper, set the engines' ``max_num_batched_tokens`` so that a step with a whole chunk
    of prefill takes at most 5 times an unloaded step's time.
    """

    uses_prefillers = False
    only_first_prompts = False


class FullDisaggregationPlacement(PlacementPolicy):
    """Every turn through a prefiller, never a prefill on a decoder (ConServe, section 5.1).

    It is stronger than the paper's, which gives up reuse across turns.
    """

    def place(
        self,
        prompt_tokens: int,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        decoder = emptiest_decoder(prompt_tokens, decoders, shared)
        return None if decoder is None else Placement(decoder.id, shortest_queue(prefillers))

    def prefill_later_turn(self, prefillers: Iterable[Prefiller]) -> str | None:
        return shortest_queue(prefillers)


class PerTurnPlacement(FullDisaggregationPlacement):
    """A later turn's prefill on its decoder or on a prefiller, decided turn by turn (section 5.1).

    This is AMPD as ConServe compares with it. With appends of some hundred tokens the decoder is
    always right, and a cost model that errs sends a turn to a prefiller, which reads the history
    from LMCache.

    Args:
        wrong_decision_rate: share of later turns sent to a prefiller; the paper reports 0.1.
    """

    prefills_later_turns = True

    def __init__(self, wrong_decision_rate: float, seed: int = 0) -> None:
        self._wrong_decision_rate = wrong_decision_rate
        self._draws = random.Random(seed)

    def prefill_later_turn(self, prefillers: Iterable[Prefiller]) -> str | None:
        if self._draws.random() >= self._wrong_decision_rate:
            return None
        return super().prefill_later_turn(prefillers)
