"""A baseline that decides each turn, sometimes wrongly."""

import random
from collections.abc import Iterable

from conserve.placement.state import (
    NOTHING_SHARED,
    Appended,
    Decoder,
    Placement,
    Prefiller,
    Shared,
    emptiest_decoder,
    shortest_queue,
)


class PerTurnPlacement:
    """A later turn's prefill on its decoder or on a prefiller, decided turn by turn.

    This is AMPD as ConServe compares with it (section 5.1). With appends of some hundred tokens the
    decoder is always right, and a cost model that errs sends a turn to a prefiller. That reads the
    history from LMCache, where decoders leave it under this policy, and the decoder takes back what
    is new.

    Args:
        wrong_decision_rate: share of later turns sent to a prefiller, drawn for each; the paper
            reports 0.1.
    """

    def __init__(self, wrong_decision_rate: float, seed: int = 0) -> None:
        self._wrong_decision_rate = wrong_decision_rate
        self._draws = random.Random(seed)

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

    def prefill_later_turn(
        self,
        prefillers: Iterable[Prefiller],
        appended: Appended | None = None,
        now_s: float = 0.0,
    ) -> str | None:
        if self._draws.random() >= self._wrong_decision_rate:
            return None
        return shortest_queue(prefillers)
