"""Decides whose call runs next: little served and small first, and nobody waits for ever."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# Of so many conversations the service is remembered; then it is forgotten of whoever was served
# least recently, which is long decayed.
_MOST = 65_536


@dataclass(slots=True)
class _Service:
    tokens: float
    at_s: float


class FeedbackQueue:
    """A multi-level feedback queue over conversations (MARS, section 4.3, Priority-Aware
    Coordinator).

    The paper gives the rules in words: a small footprint starts high, attained service demotes,
    waiting promotes, with a bound; and who is evicted follows from the same levels: the lowest
    first, of equals the largest. The formula is ours::

        begins = how many of `footprints` the call's context exceeds, as a share of the capacity
        down   = floor(log2(1 + service / quota_tokens))
        level  = clamp(max(begins, down) - floor(waited_s / age_s), 0, levels - 1)

    Level 0 goes first, and on a level whoever came first. Service is prefilled tokens and
    ``decode_weight`` times decoded ones, over all turns of a conversation, and decays with
    ``window_s``: what was long ago is no reason to wait now.

    Nobody starves: after ``levels * age_s`` a call is on level 0, where nobody goes before it who
    came later. So whoever comes more than that after another one waits behind it.

    What it ignores: how long an answer will be, which nobody knows, and who pays.

    Args:
        capacity_tokens: of the engine's KV.
        levels: how many there are.
        footprints: shares of the capacity, above each of which a call begins a level lower.
        quota_tokens: service after which level 1 is reached; each further level takes twice as
            much.
        decode_weight: a decoded token in prefilled ones; an engine's profile says what it costs.
        window_s: time constant with which service is forgotten.
        age_s: for each such wait a call rises by one level; infinite: it does not, and what is
            heavy may starve.

    Raises:
        ValueError: a setting is out of its range; says which.

    Example:
        >>> queue = FeedbackQueue(capacity_tokens=64_000)
        >>> queue.level("new", context_tokens=900, waited_s=0.0, now_s=0.0)
        0
        >>> queue.serve("busy", prefill_tokens=14_000, decode_tokens=400, now_s=0.0)
        >>> queue.level("busy", context_tokens=14_400, waited_s=0.0, now_s=0.0)
        3
        >>> queue.level("busy", context_tokens=14_400, waited_s=4.0, now_s=4.0)
        0
    """

    def __init__(
        self,
        capacity_tokens: int,
        *,
        levels: int = 4,
        footprints: Sequence[float] = (1 / 64, 1 / 16, 1 / 4),
        quota_tokens: float = 2048.0,
        decode_weight: float = 1.0,
        window_s: float = 60.0,
        age_s: float = 2.0,
    ) -> None:
        if levels < 1:
            raise ValueError(f"levels: {levels} is none")
        positive = {
            "capacity_tokens": capacity_tokens,
            "quota_tokens": quota_tokens,
            "window_s": window_s,
            "age_s": age_s,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name}: {value} is not above 0")
        if decode_weight < 0:
            raise ValueError(f"decode_weight: {decode_weight} is below 0")
        self.levels = levels
        self._bounds_tokens = [share * capacity_tokens for share in footprints]
        self._quota_tokens = quota_tokens
        self._decode_weight = decode_weight
        self._window_s = window_s
        self._age_s = age_s
        self._service: OrderedDict[str, _Service] = OrderedDict()

    def serve(self, key: str, prefill_tokens: int, decode_tokens: int, now_s: float) -> None:
        """So much was done for a conversation."""
        tokens = self.service_tokens(key, now_s) + prefill_tokens
        self._service[key] = _Service(tokens + self._decode_weight * decode_tokens, now_s)
        self._service.move_to_end(key)
        if len(self._service) > _MOST:
            self._service.popitem(last=False)

    def service_tokens(self, key: str, now_s: float) -> float:
        """Return what a conversation has been served of late, in tokens."""
        one = self._service.get(key)
        if one is None:
            return 0.0
        return one.tokens * math.exp(-max(0.0, now_s - one.at_s) / self._window_s)

    def forget(self, key: str) -> None:
        """A conversation has ended."""
        self._service.pop(key, None)

    def level(self, key: str, context_tokens: int, waited_s: float, now_s: float) -> int:
        """The level of a conversation's call.

        Args:
            context_tokens: of the call, history included.
            waited_s: since it came, or was preempted; 0 while it runs.
        """
        begins = sum(context_tokens > bound for bound in self._bounds_tokens)
        down = int(math.log2(1.0 + self.service_tokens(key, now_s) / self._quota_tokens))
        level = min(self.levels - 1, max(begins, down))
        # In levels, before it is made a whole number: age_s may be infinite, or tiny.
        risen = min(float(self.levels), max(0.0, waited_s) / self._age_s)
        return max(0, level - int(risen))
