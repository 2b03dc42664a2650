"""The ConServe paper's baselines (section 5.1)."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from conserve.placement.conversation import ConversationPlacement
from conserve.placement.policy import PlacementPolicy
from conserve.placement.state import (
    NOTHING_SHARED,
    Decoder,
    Placement,
    Prefiller,
    Shared,
    emptiest_decoder,
    shortest_queue,
)


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
