"""Decides whose KV stays between turns, for how long, and whose goes first."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

_MOST = 65_536


class Pin(NamedTuple):
    """Tells what is kept of a history between turns.

    Attributes:
        level: of its conversation, 0 for the highest (`FeedbackQueue`).
        blocks: how many are kept.
        until_s: when it goes by itself.
        awaited: whether its next turn is here, and waits to run.
    """

    level: int
    blocks: int
    until_s: float
    awaited: bool = False


class Retention:
    """How long a history's KV is held for its next turn, and who has to give it up first (MARS,
    section 4.3, Opportunistic Co-Scheduler).

    The paper holds a context's KV over a tool's run "for a bounded interval", weighs a warm resume
    against the memory held, and reclaims such contexts before it preempts anybody; it has no
    formula. Here:

    - A turn that its client calls the last one is not held for.
    - Else, for the time until the next turn is expected, times ``factor``: what the client says,
      or a moving average (weight ``weight``) of the conversation's own gaps, or of all
      conversations'. At least ``hold_s``: the time in which a conversation's table has its say.
    - What is expected later than ``longest_s`` would be held in vain; so for ``hold_s`` alone.

    Reclaimed are what has expired; then histories whose next turn is not here yet before those
    whose is; then the lowest level; and of equals the largest, which frees most.

    Args:
        hold_s: see above.
        longest_s: nothing is held for longer.
        factor: how many times the expected gap.
        weight: of the newest gap in the averages.

    Raises:
        ValueError: a setting is out of its range; says which.

    Example:
        >>> retention = Retention()
        >>> retention.hold_for_s("c")
        2.0
        >>> retention.returned("c", after_s=8.0)
        >>> retention.hold_for_s("c"), retention.hold_for_s("other")
        (16.0, 16.0)
        >>> retention.hold_for_s("c", expected_s=300.0), retention.hold_for_s("c", last=True)
        (2.0, 0.0)
        >>> pins = {"small": Pin(2, 9, 60.0), "large": Pin(2, 90, 60.0), "high": Pin(0, 99, 60.0)}
        >>> retention.give_up_order(pins, now_s=10.0)
        ['large', 'small', 'high']
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
        """A history's turn has come, so long after the one before had ended."""
        after_s = max(0.0, after_s)
        self._any_gap_s = self._averaged(self._any_gap_s, after_s)
        self._gap_s[key] = self._averaged(self._gap_s.get(key), after_s)
        self._gap_s.move_to_end(key)
        if len(self._gap_s) > _MOST:
            self._gap_s.popitem(last=False)

    def forget(self, key: str) -> None:
        """A history has ended."""
        self._gap_s.pop(key, None)

    def hold_for_s(self, key: str, expected_s: float | None = None, last: bool = False) -> float:
        """How long to hold a history's KV from its turn's end on.

        Args:
            expected_s: when its client expects the next turn, from the answer on; None: it does
                not say.
            last: whether its client says that none will follow.
        """
        if last:
            return 0.0
        if expected_s is None:
            expected_s = self._gap_s.get(key, self._any_gap_s)
        if expected_s is None or expected_s > self._longest_s:
            return self._hold_s
        return min(self._longest_s, max(self._hold_s, self._factor * expected_s))

    def give_up_order(self, pins: Mapping[str, Pin], now_s: float) -> list[str]:
        """Histories in the order in which they give up what is held."""

        def rank(key: str) -> tuple[bool, bool, int, int]:
            pin = pins[key]
            return pin.until_s > now_s, pin.awaited, -pin.level, -pin.blocks

        return sorted(pins, key=rank)

    def _averaged(self, before_s: float | None, after_s: float) -> float:
        if before_s is None:
            return after_s
        return before_s + self._weight * (after_s - before_s)
