"""Decides for how long KV is kept between turns, and which is given up first."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

_MOST = 65_536


class Pin(NamedTuple):
    """KV of a history that is kept between turns; its next turn waits to run if ``awaited``."""

    level: int
    blocks: int
    until_s: float
    awaited: bool = False


class Retention:
    """Holds a history's KV for its next turn (MARS, section 4.3, Opportunistic Co-Scheduler).

    The paper holds it "for a bounded interval", without a formula. Here it is ``factor`` times the
    expected gap, at least ``hold_s``; ``hold_s`` alone if the gap is over ``longest_s``, and
    nothing after a last turn. The gap is what the client says, or a moving average of the
    conversation's own, or of all. ValueError if a setting is out of its range.
    """

    def __init__(
        self,
        *,
        hold_s: float = 2.0,
        longest_s: float = 60.0,
        factor: float = 2.0,
        weight: float = 0.3,
    ) -> None:
        if not 0 <= hold_s <= longest_s:
            raise ValueError(f"hold_s: {hold_s} is not within 0 and longest_s, {longest_s}")
        if not factor > 0:
            raise ValueError(f"factor: {factor} is not above 0")
        if not 0 < weight <= 1:
            raise ValueError(f"weight: {weight} is not within 0 and 1")
        self._hold_s = hold_s
        self._longest_s = longest_s
        self._factor = factor
        self._weight = weight
        self._gap_s: OrderedDict[str, float] = OrderedDict()
        self._any_gap_s: float | None = None

    def returned(self, key: str, after_s: float) -> None:
        """Take account of a turn that came ``after_s`` after the history's last one ended."""
        after_s = max(0.0, after_s)
        self._any_gap_s = self._averaged(self._any_gap_s, after_s)
        self._gap_s[key] = self._averaged(self._gap_s.get(key), after_s)
        self._gap_s.move_to_end(key)
        if len(self._gap_s) > _MOST:
            self._gap_s.popitem(last=False)

    def forget(self, key: str) -> None:
        self._gap_s.pop(key, None)

    def hold_for_s(self, key: str, expected_s: float | None = None, last: bool = False) -> float:
        """Return how long to hold a history's KV, from its turn's end on."""
        if last:
            return 0.0
        if expected_s is None:
            expected_s = self._gap_s.get(key, self._any_gap_s)
        if expected_s is None or expected_s > self._longest_s:
            return self._hold_s
        return min(self._longest_s, max(self._hold_s, self._factor * expected_s))

    def give_up_order(self, pins: Mapping[str, Pin], now_s: float) -> list[str]:
        """Return the histories in the order in which they give up their pins.

        Expired ones first, then those whose next turn is not here, then the lowest level, then the
        largest.
        """

        def rank(key: str) -> tuple[bool, bool, int, int]:
            pin = pins[key]
            return pin.until_s > now_s, pin.awaited, -pin.level, -pin.blocks

        return sorted(pins, key=rank)

    def _averaged(self, before_s: float | None, after_s: float) -> float:
        if before_s is None:
            return after_s
        return before_s + self._weight * (after_s - before_s)
