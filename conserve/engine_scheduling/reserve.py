"""How many SMs decodes have to themselves while prefills run beside them."""

from collections.abc import Sequence


class DecodeReserve:
    """R, fed back on time per output token (AgentServe, algorithm 1, lines 5 to 10 and 19).

    Over an interval with decodes beside prefills, TPOT is the time of its steps over their number
    (dL/dK). Above ``late_s`` decodes get the next larger of the sizes that there are; below
    ``calm_share * late_s`` the next smaller one, but none below R_base. The paper leaves open what
    that is: here it is R_g* (equation 6), the smallest size at which decodes reach the rate
    r_min = 1 / tau_max, with ``late_s`` as tau_max, as far as that has been seen. By the paper's
    first assumption (more SMs are never slower) a size that was too slow speaks for all below it.

    The paper gives no constants: these are ours. So are four departures:

    - A border is only where two are. With no prefill decodes have all SMs, and with no decode
      prefills have; the paper would keep R for decodes that are not there.
    - R = S would leave prefills nothing, and they would wait for ever. While one waits, decodes
      have ``most_share`` of the SMs at most, and once it has waited for ``longest_wait_s`` they
      have R_base, until it is through.
    - What was seen of a size is forgotten after ``forget_s``: as batches shrink, a size that was
      too slow may do.
    - Where nothing moves the border (an engine on a CPU, on slots by MPS, or on no slots) there is
      nothing to decide, and R stays 0.

    Attributes:
        sizes_sms: as it was given.
        tpot_s: of the last interval.

    Args:
        sizes_sms: what decodes can have, ascending; the last is all there is (S). None: nothing
            moves the border.
        late_s: theta_high and tau_max, the bound of time per output token.
        calm_share: theta_low, as a share of ``late_s``.
        interval_s: dt: so long at least, and eight steps, all with the same size.
        most_share: what decodes have at most while a prefill waits.
        longest_wait_s: after which a prefill gets all but R_base.
        forget_s: how long a size that was too slow is not tried again.

    Raises:
        ValueError: a setting is out of its range; says which.

    Example:
        >>> reserve = DecodeReserve((16, 32, 64, 132), late_s=0.05)
        >>> reserve.decide(decodes=True, waited_s=0.1, now_s=0.0)
        16
        >>> for step in range(1, 9):
        ...     reserve.step(0.08, decode_sms=16, now_s=step * 0.08)
        >>> reserve.decide(decodes=True, waited_s=0.7, now_s=0.7)  # Late.
        32
        >>> reserve.decide(decodes=True, waited_s=None, now_s=0.8)  # Nobody else is there.
        132
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
        self._calm_s = calm_share * late_s
        self._interval_s = interval_s
        self._longest_wait_s = longest_wait_s
        self._forget_s = forget_s
        # Positions among the sizes: of the largest beside prefills, and of R.
        most = most_share * self.sizes_sms[-1] if self.sizes_sms else 0
        self._most = max(0, sum(size <= most for size in self.sizes_sms) - 1)
        self._at = 0
        # When a size was too slow, by its position.
        self._slow_s: dict[int, float] = {}
        self._size_sms: int | None = None
        self._since_s = 0.0
        self._lasted_s = 0.0
        self._steps = 0
        self.tpot_s = 0.0

    def decide(self, *, decodes: bool, waited_s: float | None, now_s: float) -> int:
        """How many SMs decodes are to have in the next step.

        Args:
            decodes: whether there are any.
            waited_s: how long the oldest prefill has been there, running or not; None: there is
                none.
        """
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

    def base_sms(self, now_s: float) -> int:
        """R_base: the smallest size that is not known to be too slow."""
        return self.sizes_sms[self._base(now_s)] if self.sizes_sms else 0

    def step(self, lasted_s: float, decode_sms: int, now_s: float) -> None:
        """A step with decodes, beside a prefill, is over.

        Args:
            lasted_s: from its beginning, or the end of the step before, to its end.
            decode_sms: what decodes had in it.
        """
        if decode_sms not in self.sizes_sms:
            return
        if decode_sms != self._size_sms:
            # A step of another size says nothing of this one.
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
        if self.tpot_s < self._calm_s:
            self._at = min(self._most, max(self._base(now_s), at - 1))

    def _base(self, now_s: float) -> int:
        """R_g*, as far as it has been seen, as a position."""
        slow = [at for at, seen_s in self._slow_s.items() if now_s - seen_s < self._forget_s]
        return min(self._most, max(slow, default=-1) + 1)
