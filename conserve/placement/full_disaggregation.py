"""A baseline: every turn's prefill runs on a prefiller."""

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
    shortest_queue,
)


@dataclass(frozen=True, slots=True)
class FullDisaggregationPlacement:
    """Every turn through a prefiller, never a prefill on a decoder (ConServe, section 5.1).

    The decoder is kept for the conversation's life, and finds the history in its own cache; the
    prefiller finds earlier prompts in its own cache and in LMCache. Neither is in the paper's
    baseline, which gives up reuse across turns: this one is the stronger.

    Example:
        >>> policy = FullDisaggregationPlacement()
        >>> policy.prefill_later_turn([Prefiller("p1", 800), Prefiller("p2", 20)])
        'p2'
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

    def prefill_later_turn(
        self,
        prefillers: Iterable[Prefiller],
        appended: Appended | None = None,
        now_s: float = 0.0,
    ) -> str | None:
        return shortest_queue(prefillers)
