"""A baseline in which every replica prefills and decodes."""

from collections.abc import Iterable
from dataclasses import dataclass

from conserve.placement.state import (
    NOTHING_SHARED,
    Appended,
    Decoder,
    Placement,
    Prefiller,
    Shared,
    emptiest_decoder,
)


@dataclass(frozen=True, slots=True)
class CollocatedPlacement:
    """Each conversation on the emptiest replica, prefill and decode batched (ConServe, section
    5.1).

    Set the engines' ``max_num_batched_tokens`` so that a step with a whole chunk of prefill stays
    within the SLO for TBT: the paper's rule is 5 times an unloaded step's time.
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
        return None if decoder is None else Placement(decoder.id, None)

    def prefill_later_turn(
        self,
        prefillers: Iterable[Prefiller],
        appended: Appended | None = None,
        now_s: float = 0.0,
    ) -> str | None:
        return None
