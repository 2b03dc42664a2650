"""Reserves SMs for decodes while prefills run beside them."""

from collections.abc import Sequence


class DecodeReserve:
    """R, by feedback on time per output token (AgentServe, algorithm 1, lines 5 to 10 and 19).

    Over an interval with decodes beside prefills, TPOT is the time of its steps over their number
    (dL/dK). Above ``late_s`` decodes get the next larger size; below ``calm_share * late_s`` the
    next smaller one, but none below R_base. R_base is R_g* (equation 6), the smallest size not seen
    to be slower than ``late_s`` (theta_high and tau_max) within ``forget_s``. See README.md for
    departures.

    Args:
        sizes_sms: what decodes can have, ascending, up to all (S). Empty if nothing moves the
            border.

    Raises:
        ValueError: a setting is out of its range.
    """

    _LEAST_STEPS = 8

    def __init__(
        self,
        sizes_sms: Sequence[int],
        *,
        late_s: float = 0.05,
        calm_share: float = 0.6,
        interval_s: float = 0.05,
        most_share: float = 0.9,
        longest_wait_s: float = 5.0,
        forget_s: float = 60.0,
    ) -> None:
        if list(sizes_sms) != sorted(set(sizes_sms)) or any(size < 1 for size in sizes_sms):
            raise ValueError(f"sizes_sms: {list(sizes_sms)} do not ascend from 1")
        if not late_s > 0:
            raise ValueError(f"late_s: {late_s} is not above 0")
        if not 0 <= calm_share < 1:
            raise ValueError(f"calm_share: {calm_share} is not within 0 and 1")
        if not 0 < most_share < 1:
            raise ValueError(f"most_share: {most_share} is not between 0 and 1")
        self.sizes_sms = tuple(sizes_sms)
        self.late_s = late_s
        self._calm_share = calm_share
        self._interval_s = interval_s
        self._longest_wait_s = longest_wait_s
        self._forget_s = forget_s
        # Positions among the sizes: of the largest beside prefills, and of R.
        most = most_share * self.sizes_sms[-1] if self.sizes_sms else 0
        self._most = max(0, sum(size <= most for size in self.sizes_sms) - 1)
        self._at = 0
        # When each size was too slow, by its position.
        self._slow_s: dict[int, float] = {}
        self._size_sms: int | None = None
        self._since_s = 0.0
        self._lasted_s = 0.0
        self._steps = 0
        self.tpot_s = 0.0

    def decide(self, *, decodes: bool, waited_s: float | None, now_s: float) -> int:
        """Return how many SMs decodes have next; ``waited_s`` is the oldest prefill's."""
        if not self.sizes_sms:
            return 0
        if waited_s is None:
            return self.sizes_sms[-1]
        if not decodes:
            return 0
        base = self._base(now_s)
        if waited_s > self._longest_wait_s:
            return self.sizes_sms[base]
        return self.sizes_sms[max(base, self._at)]

    def step(self, lasted_s: float, decode_sms: int, now_s: float) -> None:
        if decode_sms not in self.sizes_sms:
            return
        if decode_sms != self._size_sms:
            self._size_sms, self._since_s = decode_sms, now_s - lasted_s
            self._lasted_s, self._steps = 0.0, 0
        self._lasted_s += lasted_s
        self._steps += 1
        if self._steps < self._LEAST_STEPS or now_s - self._since_s < self._interval_s:
            return
        self.tpot_s = self._lasted_s / self._steps
        self._size_sms = None
        at = self.sizes_sms.index(decode_sms)
        if self.tpot_s > self.late_s:
            self._slow_s[at] = now_s
            self._at = min(self._most, at + 1)
            return
        for position in [one for one in self._slow_s if one >= at]:
            del self._slow_s[position]
        if self.tpot_s < self._calm_share * self.late_s:
            self._at = min(self._most, max(self._base(now_s), at - 1))

    def _base(self, now_s: float) -> int:
        """Return the position of R_g*, as far as it has been seen."""
        slow = [at for at, seen_s in self._slow_s.items() if now_s - seen_s < self._forget_s]
        return min(self._most, max(slow, default=-1) + 1)
