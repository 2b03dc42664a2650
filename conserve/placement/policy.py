"""The base class of placement policies."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from conserve.placement.load import Loads
from conserve.placement.state import NOTHING_SHARED, Decoder, Placement, Prefiller, Shared


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
    ) -> dict[str, float]:
        """Return what one turn costs at each decoder, in seconds, all that it delays included."""
        return {}

    def prefill_later_turn(self, prefillers: Iterable[Prefiller]) -> str | None:
        """Return the prefiller of a bound history's turn; None means its decoder."""
        return None

    def homes(
        self, decoders: Iterable[Decoder], prefillers: Iterable[Prefiller], now_s: float
    ) -> list[Decoder]:
        """Return the decoders that new conversations may go to, with or without room."""
        return list(decoders)
