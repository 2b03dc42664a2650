"""Reserves SMs for decodes while prefills run beside them."""

from collections.abc import Sequence


class DecodeReserve:
    """R, by feedback on time per output token (AgentServe, algorithm 1, lines 5 to 10 and 19).

    Over an interval with decodes beside prefills, TPOT is the time of its steps over their number
    (dL/dK). Above ``late_s`` decodes get the next larger size; in calm the next smaller one, but
    none below R_base. R_base is R_g* (equation 6), the smallest size not seen to be slower than
    ``late_s`` (theta_high and tau_max) within a minute. See README.md
    for departures.

    Args:
        sizes_sms: what decodes can have, ascending, up to all (S). Empty if nothing moves the
            border; then `decide` is not asked.
    """

    # At least this many steps and seconds decide; below this share of ``late_s`` steps are calm.
    _LEAST_STEPS = 8
    _LEAST_S = 0.05
    _CALM_SHARE = 0.6
    # Most of the SMs that decodes have beside a prefill, until that has waited for this long.
    _MOST_SHARE = 0.9
    _LONGEST_WAIT_S = 5.0
    _FORGET_S = 60.0

    def __init__(self, sizes_sms: Sequence[int]) -> None:
        self.sizes_sms = tuple(sizes_sms)
        self.late_s = 0.05
        # Positions among the sizes: of the largest beside prefills, and of R.
        most = self._MOST_SHARE * self.sizes_sms[-1] if self.sizes_sms else 0
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
        if waited_s is None:
            return self.sizes_sms[-1]
        if not decodes:
            return 0
        at = 0 if waited_s > self._LONGEST_WAIT_S else self._at
        return self.sizes_sms[max(self._base(now_s), at)]

    def step(self, lasted_s: float, decode_sms: int, now_s: float) -> None:
        if decode_sms not in self.sizes_sms:
            return
        if decode_sms != self._size_sms:
            self._size_sms, self._since_s = decode_sms, now_s - lasted_s
            self._lasted_s, self._steps = 0.0, 0
        self._lasted_s += lasted_s
        self._steps += 1
        if self._steps < self._LEAST_STEPS or now_s - self._since_s < self._LEAST_S:
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
        if self.tpot_s < self._CALM_SHARE * self.late_s:
            self._at = min(self._most, max(self._base(now_s), at - 1))

    def _base(self, now_s: float) -> int:
        """Return the position of R_g*, as far as it has been seen."""
        slow = [at for at, seen_s in self._slow_s.items() if now_s - seen_s < self._FORGET_S]
        return min(self._most, max(slow, default=-1) + 1)
