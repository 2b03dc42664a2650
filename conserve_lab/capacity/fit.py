"""Fits curves to measured points: constant, linear and quadratic terms, none below zero.

It minimizes squared relative errors, since a curve spans milliseconds to seconds. A curve that does
not describe its points is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from autoscale.capacity.profile import (
    DecodeCurve,
    Encoding,
    Handoff,
    Interference,
    Overhead,
    PrefillCurve,
    Quality,
    StageCurves,
    StageSize,
)

# A fit is good if it explains the points' variance. If they hardly vary, R^2 says nothing, and the
# typical residual decides.
MIN_R_SQUARED = 0.95
# Iterations take milliseconds, so other work of the machine shows in them.
MIN_R_SQUARED_STEPS = 0.90
# A term below this share of the quickest point counts as zero.
_ROUNDING = 1e-9
MAX_TYPICAL_RESIDUAL_SHARE = 0.10
# Points hardly vary if the slowest takes less than this many times the quickest.
HARDLY_VARY_RATIO = 1.5
# Limit of each point's residual, as many good points would hide a bad one.
MAX_RESIDUAL_SHARE = 0.5


class FitError(ValueError):
    """Points do not make a curve; the message says how far off it is and what to do."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A prefill of ``new_tokens`` after ``cached_tokens`` found in the prefix cache."""

    new_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A decode iteration of ``sequences`` that read ``kv_tokens`` of KV in all."""

    sequences: int
    kv_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MixedPoint:
    """An iteration with a prefill beside running decodes."""

    sequences: int
    kv_tokens: int
    new_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HandoffPoint:
    """KV of ``tokens`` moved to a decoder."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EncodingPoint:
    """A prefill of ``new_tokens``, for which an image of ``encoded_tokens`` was encoded."""

    encoded_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnPoint:
    """A turn's time to first token, as a client sees it.

    ``handed_off_tokens`` is 0 without a prefiller. ``engines_s`` is the engines' own time for as
    long a
    prompt, measured just before.
    """

    prompt_tokens: int
    handed_off_tokens: int
    cached_tokens: int
    engines_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StagePoint:
    """An encode or a prefill of ``seconds`` beside decodes on ``decode_sms``.

    ``step_s`` is the median time between their tokens meanwhile.
    """

    decode_sms: int
    seconds: float
    step_s: float


def stage_point(
    decode_sms: int, seconds: float, ended_s: float, answers: Sequence[Sequence[float]]
) -> StagePoint:
    """Make a point of the end of a stage, and of the times of answers' tokens.

    Raises `FitError` if the stage took no time, or an answer did not decode all the while.
    """
    began_s = ended_s - seconds
    if not seconds > 0:
        raise FitError("the decoder's lane was not used; the model may not allow it")
    if any(len(times) < 2 or times[0] > began_s or times[-1] < ended_s for times in answers):
        raise FitError(
            f"an answer did not decode all the {seconds:.3g} s of an encode or prefill; allow "
            "longer ones (--longest-tokens)"
        )
    gaps = [gap for times in answers for gap in pairwise(times)]
    # A gap at either end is beside the stage only in part.
    within = [gap for gap in gaps if began_s <= gap[0] and gap[1] <= ended_s]
    beside = within or [gap for gap in gaps if gap[0] < ended_s and began_s < gap[1]]
    return StagePoint(decode_sms, seconds, float(np.median([b - a for a, b in beside])))


def stage_curves(
    encodes: Sequence[StagePoint], prefills: Sequence[StagePoint], sms: int, output_tokens: float
) -> StageCurves:
    """Return a profile's stages; each size needs a point of both kinds."""
    beside = {point.decode_sms: point for point in prefills}
    sizes = [
        StageSize(
            decode_sms=one.decode_sms,
            encode_s=one.seconds,
            prefill_s=beside[one.decode_sms].seconds,
            decode_beside_encode_s=one.step_s,
            decode_beside_prefill_s=beside[one.decode_sms].step_s,
        )
        for one in sorted(encodes, key=lambda point: point.decode_sms)
    ]
    return StageCurves(sms=sms, output_tokens=output_tokens, sizes=tuple(sizes))


def fit_prefill(
    points: Sequence[PrefillPoint], min_r_squared: float = MIN_R_SQUARED
) -> PrefillCurve:
    """Fit the curve of ConServe's figure 2, cold and with a cached prefix; raises `FitError`."""
    cold = [point for point in points if not point.cached_tokens]
    cached = [point for point in points if point.cached_tokens]
    # With fewer lengths, the quadratic term fits anything.
    _require_distinct("prefill", "prompt lengths", {point.new_tokens for point in cold}, 4)
    # Two constants: cold prompts run on a prefiller, which hands KV over, appends on a decoder.
    columns = _table(
        [
            (
                not p.cached_tokens,
                bool(p.cached_tokens),
                p.new_tokens,
                p.new_tokens * (p.new_tokens + 2 * p.cached_tokens),
                p.cached_tokens,
            )
            for p in points
        ]
    )
    terms = _not_negative(columns, _times(points))
    if not terms.any():
        raise FitError("prefill: the measured times are all zero; measure again")
    curve = PrefillCurve(
        constant_s=terms[0],
        cached_constant_s=terms[1] if cached else None,
        per_token_s=terms[2],
        per_token_squared_s=terms[3],
        per_cached_token_s=terms[4],
        longest_tokens=max(point.new_tokens + point.cached_tokens for point in points),
    )
    qualities = {}
    for name, some, where in (("prefill", cold, "quality"), ("append", cached, "cached_quality")):
        if some:
            said = [curve.seconds(point.new_tokens, point.cached_tokens) for point in some]
            qualities[where] = _judge(name, some, said, min_r_squared)
    return curve.model_copy(update=qualities)


def fit_decode(
    points: Sequence[DecodePoint], min_r_squared: float = MIN_R_SQUARED_STEPS
) -> DecodeCurve:
    """Fit the plane of ConServe's figure 4, over batch size and KV; raises `FitError`."""
    _require_distinct("decode", "batch sizes", {point.sequences for point in points}, 3)
    _require_distinct("decode", "amounts of KV", {point.kv_tokens for point in points}, 3)
    terms = _not_negative(
        _table([(1, point.sequences, point.kv_tokens) for point in points]), _times(points)
    )
    # On some processors a zero term comes out as a rounding error of the others.
    if not terms[0] > _ROUNDING * min(point.seconds for point in points):
        raise FitError(
            "decode: an iteration of nothing would take no time, so the points are off; "
            "measure again, on a machine that does nothing else"
        )
    curve = DecodeCurve(constant_s=terms[0], per_sequence_s=terms[1], per_kv_token_s=terms[2])
    said = [curve.step_s(point.sequences, point.kv_tokens) for point in points]
    quality = _judge("decode", points, said, min_r_squared)
    return curve.model_copy(update={"quality": quality})


def fit_interference(
    points: Sequence[MixedPoint],
    prefill: PrefillCurve,
    decode: DecodeCurve,
    min_r_squared: float = MIN_R_SQUARED_STEPS,
) -> Interference:
    """Fit the share of an append's time that adds to its iteration (ConServe, figure 5)."""
    _require_distinct("interference", "append lengths", {point.new_tokens for point in points}, 3)
    adds = [prefill.marginal_s(point.new_tokens, point.cached_tokens) for point in points]
    alone = [decode.step_s(point.sequences, point.kv_tokens) for point in points]
    times = _times(points)
    # Errors are relative to the whole iteration.
    share = _not_negative(_table([(add,) for add in adds]), times - np.array(alone), times)[0]
    said = [step_s + share * add for step_s, add in zip(alone, adds, strict=True)]
    quality = _judge("interference", points, said, min_r_squared)
    return Interference(prefill_share=share, quality=quality)


def fit_handoff(
    points: Sequence[HandoffPoint], bytes_per_token: float, min_r_squared: float = MIN_R_SQUARED
) -> Handoff:
    """Fit the line of ConServe's figure 3; raises `FitError`."""
    _require_distinct("handoff", "lengths", {point.tokens for point in points}, 3)
    terms = _not_negative(_table([(1, point.tokens) for point in points]), _times(points))
    curve = Handoff(constant_s=terms[0], per_token_s=terms[1], bytes_per_token=bytes_per_token)
    said = [curve.seconds(point.tokens) for point in points]
    quality = _judge("handoff", points, said, min_r_squared)
    return curve.model_copy(update={"quality": quality})


def fit_encoding(
    points: Sequence[EncodingPoint],
    prefill: PrefillCurve,
    min_r_squared: float = MIN_R_SQUARED_STEPS,
) -> Encoding:
    """Fit what images add to the prefills that a curve describes; raises `FitError`."""
    alone = [prefill.seconds(point.new_tokens) for point in points]
    times = _times(points)
    columns = _table([(point.encoded_tokens,) for point in points])
    per_token_s = _not_negative(columns, times - np.array(alone), times)[0]
    said = [
        prefill_s + per_token_s * point.encoded_tokens
        for prefill_s, point in zip(alone, points, strict=True)
    ]
    quality = _judge("encoding", points, said, min_r_squared)
    return Encoding(per_token_s=per_token_s, quality=quality)


def fit_overhead(
    points: Sequence[TurnPoint], min_r_squared: float = MIN_R_SQUARED_STEPS
) -> Overhead:
    """Fit what turns took beyond their engines: a constant for each kind of turn.

    Engines' times are from just before, as a machine's speed drifts by more than the overhead.
    """
    constants = []
    for what, handed_off in (("direct", False), ("handed off", True)):
        beyond = [
            point.seconds - point.engines_s
            for point in points
            if bool(point.handed_off_tokens) is handed_off
        ]
        if not beyond:
            raise FitError(f"overhead: no turn was {what}; measure one of each kind")
        # A negative overhead is noise.
        constants.append(max(0.0, float(np.median(beyond))))
    said = [point.engines_s + constants[bool(point.handed_off_tokens)] for point in points]
    quality = _judge("overhead", points, said, min_r_squared)
    return Overhead(direct_s=constants[0], handed_off_s=constants[1], quality=quality)


def fit_slowdown(points: Sequence[PrefillPoint | DecodePoint], seconds: Sequence[float]) -> float:
    """Return how many times as long the points took as a curve says: their geometric mean, from 1.

    Under a power cap, ConServe's figures 7 and 8 show it by lengths and batches.

    Args:
        seconds: the curve's, for each point.
    """
    ratios = _times(points) / np.array(seconds)
    return max(1.0, float(np.exp(np.log(ratios).mean())))


def _table(rows: Sequence[tuple[float, ...]]) -> Any:
    return np.array(rows, dtype=float)


def _times(points: Sequence[Any]) -> Any:
    times = np.array([point.seconds for point in points], dtype=float)
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise FitError("a measured time is zero, negative or no number; measure again")
    return times


def _not_negative(columns: Any, values: Any, scale: Any | None = None) -> Any:
    """Return the least squares with no coefficient below zero; errors are relative to ``scale``.

    Trying all choices of columns is exact, and quick for five.
    """
    scale = values if scale is None else scale
    weighted, wanted = columns / scale[:, None], values / scale
    # Columns of 1 and of squared tokens side by side would lose digits.
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1
    weighted = weighted / norms
    best, best_error = np.zeros(columns.shape[1]), float(wanted @ wanted)
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            part, *_ = np.linalg.lstsq(weighted[:, chosen], wanted, rcond=None)
            if (part < 0).any():
                continue
            off = weighted[:, chosen] @ part - wanted
            if off @ off < best_error:
                best_error = float(off @ off)
                best = np.zeros(columns.shape[1])
                best[list(chosen)] = part
    return best / norms


def _judge(
    name: str, points: Sequence[Any], said: Sequence[float], min_r_squared: float
) -> Quality:
    measured, fitted = _times(points), np.array(said)
    residuals = np.abs(fitted - measured)
    spread = float(((measured - measured.mean()) ** 2).sum())
    r_squared = 1 - float((residuals**2).sum()) / spread if spread else 0.0
    shares = residuals / measured
    quality = Quality(
        r_squared=r_squared,
        worst_residual_s=float(residuals.max()),
        worst_residual_share=float(shares.max()),
        typical_residual_share=float(np.median(shares)),
        points=len(points),
    )
    hardly_vary = measured.max() < HARDLY_VARY_RATIO * measured.min()
    close = hardly_vary and quality.typical_residual_share <= MAX_TYPICAL_RESIDUAL_SHARE
    why = None
    if r_squared < min_r_squared and not close:
        why = (
            f"R^2 is {r_squared:.3f} (at least {min_r_squared:g} is needed) and a point is "
            f"typically {quality.typical_residual_share:.0%} off"
        )
    elif quality.worst_residual_share > MAX_RESIDUAL_SHARE:
        why = f"a point is more than {MAX_RESIDUAL_SHARE:.0%} off"
    if why is not None:
        worst = points[int(shares.argmax())]
        raise FitError(
            f"{name}: no curve fits, {why}; the worst, {quality.worst_residual_share:.0%} off, is "
            f"{worst}. Measure again with more repetitions, on a machine that does nothing else"
        )
    return quality


def _require_distinct(name: str, what: str, found: set[int], least: int) -> None:
    if len(found) < least:
        raise FitError(f"{name}: {len(found)} different {what} were measured; {least} are needed")
