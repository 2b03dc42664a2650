"""A baseline in which every turn's prefill runs on a prefiller."""

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

    The paper's baseline gives up reuse across turns. This one is stronger: the decoder finds the
    history in its own cache, and the prefiller finds earlier prompts there and in LMCache.
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
