"""Bounds the part of background calls in a step, since a step cannot be stopped once it runs."""

import math

from conserve_inside.policy.chunks import StepCost

# Beside interactive decodes a step takes at most this many times as long as without background.
_BESIDE = 1.1
# For so long after an interactive call, a step takes at most as long as this many lone decodes.
_SHORT_FOR_S, _LONE_STEPS = 30.0, 5.0
_LEAST_CHUNK_TOKENS = 16


class Background:
    """Holds background calls while interactive ones run, and keeps steps short in between (ours).

    Held calls prefill nothing, and few of them decode. They are held for at most ``longest_s`` in a
    row, and then run freely for as long.
    """

    def __init__(self, *, longest_s: float = 10.0) -> None:
        self._longest_s = longest_s
        # It remembers steps for long enough to have seen different numbers of decodes.
        self._decode_cost, self._chunk_cost = StepCost(0.998, 2.0), StepCost()
        # A step's fixed seconds, and those that each decode and each prefilled token add.
        self._line: tuple[float, float] | None = None
        self._token_s = 0.0
        # For how long they were held, less the time that they ran since.
        self._owed_s = self._seen_s = 0.0
        self._interactive_s = -math.inf
        self._released = self.holds = self._is_short = False

    def look(self, interactive: bool, background: bool, now_s: float) -> None:
        """Note before a step whether there are calls of each class that can run."""
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        self._owed_s = max(0.0, self._owed_s + (passed_s if self.holds else -passed_s))
        self._released = self._owed_s >= (1e-9 if self._released else self._longest_s)
        self.holds = interactive and background and not self._released
        self._is_short = not interactive and now_s < self._interactive_s + _SHORT_FOR_S
        if interactive:
            self._interactive_s = now_s

    def learn(self, lasted_s: float, decodes: int, prefill_tokens: int) -> None:
        if not prefill_tokens:
            self._decode_cost.add(lasted_s, decodes)
            self._line = self._decode_cost.line() or self._line
        if self._line is not None:
            base_s, decode_s = self._line
            self._chunk_cost.add(max(0.0, lasted_s - base_s - decodes * decode_s), prefill_tokens)
            _, self._token_s = self._chunk_cost.line() or (0.0, self._token_s)

    def share(self, interactive: int, decodes: int, prefills: bool) -> tuple[int, float]:
        """Return how many of the background's ``decodes`` a step has, and how much it may prefill.

        ``prefills``: whether there are prompts that could have a part of it.
        """
        if self._line is None or not (self.holds or self._is_short):
            return 0 if self.holds else decodes, math.inf
        base_s, decode_s = self._line
        if self.holds:
            room_s = (_BESIDE - 1) * (base_s + interactive * decode_s)
            return min(decodes, int(room_s / decode_s)) if interactive else 0, math.inf
        room_s = _LONE_STEPS * (base_s + decode_s) - base_s
        # Prompts have half of it.
        decodes = min(decodes, int(room_s / (1 + prefills) / decode_s))
        tokens = (room_s - decodes * decode_s) / self._token_s if self._token_s else math.inf
        return decodes, max(_LEAST_CHUNK_TOKENS, tokens)
