"""The signals that are observed: input tokens against the profiled curve, and pooled occupancy.

Times are seconds of one clock and come in as arguments.
"""

from collections import deque
from dataclasses import dataclass

from autoscale.capacity.profile import PrefillCurve

# Ended conversations by which lifetimes and footprints are known.
_REMEMBERED = 200


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that, fully used, would just be enough, and which signal says so."""

    replicas: float
    signal: str


@dataclass(slots=True)
class Rate:
    """A rate a second over the last ``window_s``. A window not yet full counts as full."""

    window_s: float
    _seen: deque[tuple[float, float]]
    _sum: float = 0.0

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._seen = deque()
        self._sum = 0.0

    def add(self, value: float, now_s: float) -> None:
        """So much more, now."""
        self._seen.append((now_s, value))
        self._sum += value

    def per_s(self, now_s: float) -> float:
        """The rate over the window that ends now."""
        while self._seen and self._seen[0][0] <= now_s - self.window_s:
            self._sum -= self._seen.popleft()[1]
        if not self._seen:
            # What adding and subtracting left behind.
            self._sum = 0.0
        return self._sum / self.window_s


class PrefillLoad:
    """First turns' input against the profiled curve (ConServe, sections 3.1 and 4.2).

    A prompt's length says how long a prefiller will be busy with it. So the rate at which such
    seconds arrive is the number of prefillers that would be busy all the time, and what is still
    queued has to be worked off besides, within the window.

    Args:
        curve: the prefillers' profiled curve.
        window_s: the time over which rates are averaged, and in which what is queued is done.
        slowdown: factor for the curve's times, above 1 under a power cap.
    """

    def __init__(self, curve: PrefillCurve, window_s: float, slowdown: float = 1.0) -> None:
        self._curve = curve
        self._slowdown = slowdown
        self._tokens = Rate(window_s)
        self._seconds = Rate(window_s)
        self._window_s = window_s

    def arrived(self, input_tokens: int, now_s: float) -> None:
        """A prompt was sent to a prefiller."""
        self._tokens.add(input_tokens, now_s)
        self._seconds.add(self._slowdown * self._curve.seconds(input_tokens), now_s)

    def tokens_per_s(self, now_s: float) -> float:
        """Input tokens a second."""
        return self._tokens.per_s(now_s)

    def need(self, queued_tokens: float, now_s: float) -> Need:
        """Prefillers needed.

        Args:
            queued_tokens: tokens sent to prefillers and not yet prefilled. They count at the rate
                of the prompts that came, or, after a window without any, as one prompt.
        """
        tokens_per_s, busy = self._tokens.per_s(now_s), self._seconds.per_s(now_s)
        if tokens_per_s:
            queued_s = queued_tokens * busy / tokens_per_s
        else:
            queued_s = self._slowdown * self._curve.seconds(queued_tokens) if queued_tokens else 0.0
        return Need(busy + queued_s / self._window_s, "input_tokens")


@dataclass(frozen=True, slots=True)
class Pool:
    """The decoders, taken together, as observed at one moment.

    Attributes:
        capacity_tokens: one decoder's KV space; the mean over the decoders.
        held_tokens: KV held or promised for live conversations.
        waiting_tokens: prompts of the conversations for which no decoder had room.
    """

    capacity_tokens: float
    held_tokens: float
    waiting_tokens: float = 0.0


class ConversationFlow:
    """How many conversations come, how long they stay and what they hold (inequality (2)).

    ``N B >= R W`` with R, W and B as observed: arrivals over the window, lifetimes and final
    footprints of the conversations that ended last. Lifetimes of those still live are not guessed,
    so after a start, or a change for longer ones, occupancy decides until they end.
    """

    def __init__(self, window_s: float) -> None:
        self._arrivals = Rate(window_s)
        self._lifetimes_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._footprints: deque[float] = deque(maxlen=_REMEMBERED)

    def arrived(self, now_s: float) -> None:
        """A new conversation was bound."""
        self._arrivals.add(1, now_s)

    def ended(self, lifetime_s: float, held_tokens: float) -> None:
        """A conversation ended, which held so many tokens of KV at last."""
        self._lifetimes_s.append(lifetime_s)
        self._footprints.append(held_tokens)

    def need(self, pool: Pool, now_s: float) -> Need:
        """Decoders needed: by what is held, or by inequality (2), whichever is more."""
        held = (pool.held_tokens + pool.waiting_tokens) / pool.capacity_tokens
        coming = self._arrivals.per_s(now_s) * self._tokens_seconds() / pool.capacity_tokens
        return Need(held, "occupancy") if held >= coming else Need(coming, "arrivals")

    def _tokens_seconds(self) -> float:
        """W times the footprint: R W / B is this times R over the capacity."""
        ended = len(self._lifetimes_s)
        if not ended:
            return 0.0
        return sum(self._lifetimes_s) / ended * (sum(self._footprints) / ended)
