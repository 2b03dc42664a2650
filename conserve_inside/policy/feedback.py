"""Decides which call runs next: small ones that were served little first, and none starves."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# The service of this many conversations is remembered; the one served least recently goes first.
_MOST = 65_536


@dataclass(slots=True)
class _Service:
    tokens: float
    at_s: float


class FeedbackQueue:
    """A multi-level feedback queue over conversations (MARS, section 4.3).

    The paper's Priority-Aware Coordinator has rules, no formula: a small footprint starts high,
    attained service demotes, waiting promotes. Here, with 0 the highest level::

        begins = the number of `footprints` that context / capacity exceeds
        down   = floor(log2(1 + service / quota_tokens))
        level  = clamp(max(begins, down) - floor(waited_s / age_s), 0, levels - 1)

    Service is prefilled tokens and ``decode_weight`` times decoded ones, of all the conversation's
    turns, and decays with the time constant ``window_s``. ValueError if a setting is out of its
    range.
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
        positive = {"levels": levels, "capacity_tokens": capacity_tokens, "age_s": age_s,
                    "quota_tokens": quota_tokens, "window_s": window_s}  # fmt: skip
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
        tokens = self.service_tokens(key, now_s) + prefill_tokens
        self._service[key] = _Service(tokens + self._decode_weight * decode_tokens, now_s)
        self._service.move_to_end(key)
        if len(self._service) > _MOST:
            self._service.popitem(last=False)

    def service_tokens(self, key: str, now_s: float) -> float:
        one = self._service.get(key)
        if one is None:
            return 0.0
        return one.tokens * math.exp(-max(0.0, now_s - one.at_s) / self._window_s)

    def forget(self, key: str) -> None:
        self._service.pop(key, None)

    def level(
        self, key: str, context_tokens: int, waited_s: float, now_s: float, last: bool = False
    ) -> int:
        """Return a call's level; ``waited_s`` counts since it came or was preempted.

        ``last``: it begins on the last one.
        """
        begins = sum(context_tokens > bound for bound in self._bounds_tokens)
        down = int(math.log2(1.0 + self.service_tokens(key, now_s) / self._quota_tokens))
        level = self.levels - 1 if last else min(self.levels - 1, max(begins, down))
        # Bounded before it is made a whole number: age_s may be infinite, or tiny.
        risen = min(float(self.levels), max(0.0, waited_s) / self._age_s)
        return max(0, level - int(risen))
