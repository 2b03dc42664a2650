"""Turns observations into needed replicas: input tokens by the profiled curve, pooled occupancy."""

from collections import deque
from dataclasses import dataclass

from autoscale.capacity.profile import PrefillCurve

# Number of ended conversations whose lifetimes and footprints are averaged.
_REMEMBERED = 200


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that would just suffice at full use, and the signal that says so."""

    replicas: float
    signal: str


@dataclass(slots=True)
class Rate:
    """A rate per second over the last ``window_s``. A window not yet full counts as full."""

    window_s: float
    _seen: deque[tuple[float, float]]
    _sum: float = 0.0

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._seen = deque()
        self._sum = 0.0

    def add(self, value: float, now_s: float) -> None:
        self._seen.append((now_s, value))
        self._sum += value

    def per_s(self, now_s: float) -> float:
        while self._seen and self._seen[0][0] <= now_s - self.window_s:
            self._sum -= self._seen.popleft()[1]
        if not self._seen:
            # Remove the rounding errors of adding and subtracting.
            self._sum = 0.0
        return self._sum / self.window_s


class PrefillLoad:
    """The prefillers' load by the profiled curve (ConServe, sections 3.1 and 4.2).

    Prefilling seconds that arrive per second are the prefillers that would always be busy. The
    queue
    has to be done within ``window_s`` besides.
    """

    def __init__(self, curve: PrefillCurve, window_s: float, slowdown: float = 1.0) -> None:
        self._curve = curve
        self._slowdown = slowdown
        self._tokens = Rate(window_s)
        self._seconds = Rate(window_s)
        self._window_s = window_s

    def arrived(self, input_tokens: int, now_s: float) -> None:
        self._tokens.add(input_tokens, now_s)
        self._seconds.add(self._slowdown * self._curve.seconds(input_tokens), now_s)

    def tokens_per_s(self, now_s: float) -> float:
        return self._tokens.per_s(now_s)

    def need(self, queued_tokens: float, now_s: float) -> Need:
        """Return the prefillers needed.

        Queued tokens count at the rate of the prompts that came, or without any as one prompt.
        """
        tokens_per_s, busy = self._tokens.per_s(now_s), self._seconds.per_s(now_s)
        if tokens_per_s:
            queued_s = queued_tokens * busy / tokens_per_s
        else:
            queued_s = self._slowdown * self._curve.seconds(queued_tokens) if queued_tokens else 0.0
        return Need(busy + queued_s / self._window_s, "input_tokens")


@dataclass(frozen=True, slots=True)
class Pool:
    """All decoders together; ``capacity_tokens`` is the mean of one's KV space."""

    capacity_tokens: float
    held_tokens: float  # KV held or promised for live conversations.
    waiting_tokens: float = 0.0  # Prompts of conversations for which no decoder has room.


class ConversationFlow:
    """The decoders' load by ConServe's inequality (2), ``N B >= R W``.

    Lifetimes and final footprints are means of the conversations that ended last.
    """

    def __init__(self, window_s: float) -> None:
        self._arrivals = Rate(window_s)
        self._lifetimes_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._footprints: deque[float] = deque(maxlen=_REMEMBERED)

    def arrived(self, now_s: float) -> None:
        self._arrivals.add(1, now_s)

    def ended(self, lifetime_s: float, held_tokens: float) -> None:
        self._lifetimes_s.append(lifetime_s)
        self._footprints.append(held_tokens)

    def need(self, pool: Pool, now_s: float) -> Need:
        """Return the decoders needed for what is held, or by inequality (2) if that is more."""
        held = (pool.held_tokens + pool.waiting_tokens) / pool.capacity_tokens
        coming = self._arrivals.per_s(now_s) * self._tokens_seconds() / pool.capacity_tokens
        return Need(held, "occupancy") if held >= coming else Need(coming, "arrivals")

    def _tokens_seconds(self) -> float:
        """Return W times the footprint: R W / B is this times R, over the capacity."""
        ended = len(self._lifetimes_s)
        if not ended:
            return 0.0
        return sum(self._lifetimes_s) / ended * (sum(self._footprints) / ended)
