"""How long work takes an engine, learned from the iterations that it has taken."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec

# Assumed of an unknown engine; its first iterations scale all of it.
_ASSUMED_TOKENS_PER_S = 5_000.0
_ASSUMED_STEP_S = 0.01
_ASSUMED_SEQUENCE_S = 0.0005
# The prompt length at which a token takes twice as long as the first one.
_ASSUMED_PAIR_TOKENS = 50_000
# Taking a token from host memory takes this share of the time to compute it: see
# `conserve.pausing.policy`.
_HANDOFF_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The coefficients of an engine's curves (ConServe, section 3.1; figures 2, 3 and 5).

    Attributes:
        per_token_s, per_pair_s, per_cached_token_s: what a prefill adds to an iteration for each
            new token, each pair of a new token and one before it, and each token found cached.
        prefill_constant_s: what an iteration of prefills takes besides, if nothing decodes.
        prefill_share: of a prefill's time, what running decodes' iterations are longer by.
        step_s, per_sequence_s, per_kv_token_s: an iteration of decodes, and what each of them and
            each token of KV that they read adds.
        per_encoded_token_s: what an image adds to an iteration for each of its embeddings.
        doubt: standard deviation of a prefill's time, relative to it.
    """

    per_token_s: float
    per_pair_s: float = 0.0
    per_cached_token_s: float = 0.0
    prefill_constant_s: float = 0.0
    prefill_share: float = 1.0
    handoff_constant_s: float = 0.0
    handoff_per_token_s: float = 0.0
    chunk_tokens: int = 8192
    step_s: float = 0.0
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0
    per_encoded_token_s: float = 0.0
    doubt: float = 0.0

    @classmethod
    def assumed(cls) -> Self:
        """Return the costs that are assumed before an engine has taken its first step."""
        per_token_s = 1.0 / _ASSUMED_TOKENS_PER_S
        return cls(
            per_token_s,
            per_pair_s=per_token_s / _ASSUMED_PAIR_TOKENS,
            prefill_constant_s=_ASSUMED_STEP_S,
            handoff_per_token_s=_HANDOFF_SHARE * per_token_s,
            step_s=_ASSUMED_STEP_S,
            per_sequence_s=_ASSUMED_SEQUENCE_S,
            per_kv_token_s=_ASSUMED_SEQUENCE_S / _ASSUMED_PAIR_TOKENS,
            doubt=0.5,
        )

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """Return what a prefill adds to iterations that run anyway; without its constant."""
        pairs = new_tokens * (new_tokens + 2 * cached_tokens)
        return (
            self.per_token_s * new_tokens
            + self.per_pair_s * pairs
            + self.per_cached_token_s * cached_tokens
        )

    def encode_s(self, tokens: float) -> float:
        """Return how long images with this many embeddings hold up all of an engine's work."""
        return self.per_encoded_token_s * tokens

    def handoff_s(self, tokens: int) -> float:
        return self.handoff_constant_s + self.handoff_per_token_s * tokens if tokens > 0 else 0.0

    def decode_s(self, decodes: float, kv_tokens: float = 0) -> float:
        return self.step_s + self.per_sequence_s * decodes + self.per_kv_token_s * kv_tokens

    def times(self, prefills: float, decodes: float | None = None) -> Self:
        """Return these costs with the times of prefills, and of decodes, multiplied by a factor.

        ``decodes`` is by default as ``prefills``. Handoffs take as long as before.
        """
        by = dict.fromkeys(_OF_PREFILLS, prefills)
        by |= dict.fromkeys(_OF_DECODES, prefills if decodes is None else decodes)
        return replace(self, **{name: factor * getattr(self, name) for name, factor in by.items()})


_OF_PREFILLS = (
    *("per_token_s", "per_pair_s", "per_cached_token_s", "prefill_constant_s"),
    "per_encoded_token_s",
)
_OF_DECODES = ("step_s", "per_sequence_s", "per_kv_token_s")

# About the last hundred iterations of each kind count.
_KEEP = 0.99
# Standard deviations: of constants from their scaled prior, relative to it, and of an engine from
# others of its kind, as a logarithm.
_PRIOR_SPREAD = 0.5
_ENGINE_SPREAD = 0.5
# An engine may slow down, so only about its last ten iterations of a kind count.
_KEEP_ENGINE = 0.9
# The expected spread of iterations, relative to what they should take, before any was seen.
_NOISE = 0.2
# An iteration counts as at most this many times what was expected; the rest is an accident.
_MOST_TIMES = 2.0
# The first iterations are taken as they are: accidents cannot be told from a wrong prior yet.
_FIRST = 3.0
# Beside decodes, prefills that take a smaller share of the decodes' time are lost in noise.
_TELLING = 0.3
# Bounds of the share of a prefill's time by which it holds up decodes.
_LEAST_SHARE, _MOST_SHARE = 0.1, 1.5
# About the last twenty iterations with images count.
_KEEP_ENCODES = 0.95
# The prior counts half after this many iterations.
_PRIOR_STEPS = 10.0


class Step(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Alike iterations of an engine: their mean time, and the tokens and decodes in each.

    ``pairs`` sums ``new * (new + 2 * before)`` over prompts; ``kv_tokens`` are read by the decodes;
    ``encoded_tokens`` are embeddings of images.
    """

    lasted_s: float
    new_tokens: int = 0
    pairs: int = 0
    decodes: int = 0
    kv_tokens: int = 0
    count: int = 1
    encoded_tokens: int = 0


class StepCosts:
    """The constants of `EngineCosts` for engines of one kind, fitted to their iterations.

    An iteration of decodes takes ``step_s + per_sequence_s decodes + per_kv_token_s kv_tokens``,
    one of prefills ``prefill_constant_s + per_token_s new_tokens + per_pair_s pairs``, and one of
    both the former and ``prefill_share`` times what the latter's tokens add (ConServe, section
    3.1). The prior is of shape, not of scale: all constants are scaled to what was seen, and then
    each may depart from that.
    """

    def __init__(self, prior: EngineCosts) -> None:
        self._prior = prior
        self.decodes = _Fit((prior.step_s, prior.per_sequence_s, prior.per_kv_token_s))
        self.prefills = _Fit((prior.prefill_constant_s, prior.per_token_s, prior.per_pair_s))
        self._share = prior.prefill_share
        self._alone = 0.0
        # Seconds that iterations with images took beyond their other work, and the embeddings.
        self._encoding = (0.0, 0.0)

    def add(self, step: Step, prefills: float = 1.0, decodes: float = 1.0) -> None:
        """Learn from iterations; their engine takes these times as long as others of its kind."""
        decodes_s = decodes * self.decodes_s(step)
        if step.encoded_tokens:
            rest_s = decodes_s + prefills * self.prefills_s(step)
            self._encoded(step, max(0.0, step.lasted_s - rest_s) / prefills)
        elif not step.new_tokens:
            x = (1.0, step.decodes, step.kv_tokens)
            self.decodes.add(x, step.lasted_s / decodes, min(step.count, 10))
        elif not step.decodes:
            self._alone = min(2 * _FIRST, self._alone + step.count)
            x = (1.0, step.new_tokens, step.pairs)
            self.prefills.add(x, step.lasted_s / prefills, step.count)
        elif self.tells(step):
            beside_s, added_s = step.lasted_s - decodes_s, prefills * self.added_s(step)
            if self._alone >= _FIRST:
                # What prefills take alone is known, so this tells how much of it overlaps.
                share = min(_MOST_SHARE, max(_LEAST_SHARE, beside_s / added_s))
                self._share += (1 - _KEEP_ENGINE) * (share - self._share)
            else:
                x = (0.0, step.new_tokens, step.pairs)
                self.prefills.add(x, max(0.0, beside_s) / prefills / self._share, step.count)

    def _encoded(self, step: Step, seconds: float) -> None:
        known_s, tokens = self._encoding
        if tokens >= step.encoded_tokens:
            seconds = min(seconds, _MOST_TIMES * step.encoded_tokens * known_s / tokens)
        self._encoding = (
            _KEEP_ENCODES * known_s + seconds,
            _KEEP_ENCODES * tokens + step.encoded_tokens,
        )

    def tells(self, step: Step) -> bool:
        """Return whether prefills stand out from the noise of the decodes beside them."""
        return self._share * self.added_s(step) >= _TELLING * self.decodes_s(step)

    def decodes_s(self, step: Step) -> float:
        """Return what iterations should take for their decodes alone."""
        if not step.decodes:
            return 0.0
        return self.decodes.of((1.0, step.decodes, step.kv_tokens))

    def added_s(self, step: Step) -> float:
        """Return what their prefills should take, alone and without the constant."""
        return self.prefills.of((0.0, step.new_tokens, step.pairs))

    def prefills_s(self, step: Step) -> float:
        """Return what their prefills should add to their decodes, or take without any."""
        if step.decodes:
            return self._share * self.added_s(step)
        return self.prefills.of((1.0, step.new_tokens, step.pairs))

    def costs(self) -> EngineCosts:
        step_s, per_sequence_s, per_kv_token_s = self.decodes.constants
        constant_s, per_token_s, per_pair_s = self.prefills.constants
        scale = per_token_s / self._prior.per_token_s
        encoding_s, encoded_tokens = self._encoding
        per_encoded_token_s = scale * self._prior.per_encoded_token_s
        if encoded_tokens:
            per_encoded_token_s = encoding_s / encoded_tokens
        return replace(
            self._prior,
            step_s=step_s,
            per_sequence_s=per_sequence_s,
            per_kv_token_s=per_kv_token_s,
            prefill_constant_s=constant_s,
            per_token_s=per_token_s,
            per_pair_s=per_pair_s,
            per_cached_token_s=scale * self._prior.per_cached_token_s,
            per_encoded_token_s=per_encoded_token_s,
            prefill_share=self._share,
            doubt=self.prefills.doubt if self.prefills.weight else self._prior.doubt,
        )


class EngineStepCosts:
    """One engine's costs: those of its kind, times its own factors of recent iterations."""

    def __init__(self, kind: StepCosts) -> None:
        self._kind = kind
        self._prefills = _Factor()
        self._decodes = _Factor()

    def add(self, step: Step, *, starts: bool = False) -> None:
        """Learn from iterations; while engines start, they slow each other down."""
        if not step.lasted_s > 0:
            return
        kind, prefills, decodes = self._kind, self._prefills, self._decodes
        if starts or step.encoded_tokens:
            pass  # How long an image takes is the least certain part of it.
        elif not step.new_tokens:
            if kind.decodes.weight >= _FIRST:
                decodes.add(step.lasted_s / kind.decodes_s(step), step.count)
        elif kind.prefills.weight >= _FIRST and (not step.decodes or kind.tells(step)):
            beside_s = step.lasted_s - decodes.value * kind.decodes_s(step)
            prefills.add(beside_s / kind.prefills_s(step), step.count)
        kind.add(step, prefills.value, decodes.value)

    def costs(self) -> EngineCosts:
        costs = self._kind.costs().times(self._prefills.value, self._decodes.value)
        noise = math.sqrt(self._kind.prefills.noise)
        own = 0.0
        if self._prefills.weight:
            own = noise**2 / (self._prefills.weight + (noise / _ENGINE_SPREAD) ** 2)
        return replace(costs, doubt=math.hypot(costs.doubt, math.sqrt(own)))


class _Factor:
    """A running geometric mean of ratios, drawn to 1 while there are few."""

    __slots__ = ("_sum", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self._sum = 0.0

    @property
    def value(self) -> float:
        return math.exp(self._sum / (self.weight + (_NOISE / _ENGINE_SPREAD) ** 2))

    def add(self, ratio: float, count: int) -> None:
        value = self.value
        ratio = min(_MOST_TIMES * value, max(value / _MOST_TIMES, ratio))
        keep = _KEEP_ENGINE ** min(count, 10)
        self.weight = keep * self.weight + (1 - keep) / (1 - _KEEP_ENGINE)
        self._sum = keep * self._sum + math.log(ratio) * (1 - keep) / (1 - _KEEP_ENGINE)


class _Fit:
    """A decaying least-squares fit of three coefficients, none negative, of relative errors.

    Coefficients are drawn to the prior's, scaled to what was seen (ridge regression).
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        self.constants = tuple(prior)
        self.noise = _NOISE**2
        self.weight = 0.0
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def of(self, x: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(self.constants, x, strict=True))

    @property
    def doubt(self) -> float:
        """Return the relative doubt of a prediction in the range that it has seen."""
        return math.sqrt(self.noise / (self.weight + self.noise / _PRIOR_SPREAD**2))

    def add(self, x: Sequence[float], y: float, count: int) -> None:
        expected = self.of(x)
        if self.weight >= _FIRST and expected > 0:
            y = min(_MOST_TIMES * expected, max(expected / _MOST_TIMES, y))
            unit = min(2 * y, max(y / 2, expected))
            error = max(-1.0, min(1.0, (y - expected) / unit))
            self.noise += (1 - _KEEP) * count * (error**2 - self.noise)
        else:
            unit = y
        if not unit > 0:
            return
        keep = _KEEP**count
        self.weight = keep * self.weight + count
        for i in range(3):
            self._products[i] = keep * self._products[i] + count * x[i] * y / unit**2
            for j in range(3):
                old = self._squares[i][j]
                self._squares[i][j] = keep * old + count * x[i] * x[j] / unit**2
        self._solve()

    def _solve(self) -> None:
        """Compute the coefficients as multiples, none below 0, of the scaled prior."""
        squares, products, prior = self._squares, self._products, self._prior
        by = sum(squares[i][j] * prior[i] * prior[j] for i in range(3) for j in range(3))
        seen = sum(products[i] * prior[i] for i in range(3))
        scale = seen / by if by > 0 and seen > 0 else 1.0
        unit = [scale * one for one in prior]
        ridge = self.noise / _PRIOR_SPREAD**2 / (1 + self.weight / _PRIOR_STEPS)
        free = [i for i in range(3) if unit[i] > 0]
        multiples = [0.0] * 3
        while free:
            rows = [
                [squares[i][j] * unit[i] * unit[j] + (ridge if i == j else 0.0) for j in free]
                + [products[i] * unit[i] + ridge]
                for i in free
            ]
            solved = _solved(rows)
            if min(solved) >= 0:
                for i, one in zip(free, solved, strict=True):
                    multiples[i] = one
                break
            free = [i for i, one in zip(free, solved, strict=True) if one >= 0]
        self.constants = tuple(m * u for m, u in zip(multiples, unit, strict=True))


def _solved(rows: list[list[float]]) -> list[float]:
    """Solve linear equations whose matrix is positive definite, by elimination."""
    n = len(rows)
    for i in range(n):
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, n + 1):
                rows[k][j] -= factor * rows[i][j]
    found = [0.0] * n
    for i in reversed(range(n)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, n))
        found[i] = (rows[i][n] - rest) / rows[i][i]
    return found
