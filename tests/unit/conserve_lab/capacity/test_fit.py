import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.capacity.profile import DecodeCurve, PrefillCurve
from conserve_lab.capacity import fit
from conserve_lab.capacity.fit import (
    DecodePoint,
    EncodingPoint,
    FitError,
    HandoffPoint,
    MixedPoint,
    PrefillPoint,
    TurnPoint,
    fit_decode,
    fit_encoding,
    fit_handoff,
    fit_interference,
    fit_overhead,
    fit_prefill,
    stage_point,
)

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
APPENDS = tuple((new, cached) for new in (64, 256, 1024) for cached in (1024, 4096, 12288))


def noisy(value_s: float, noise: float, draws: random.Random) -> float:
    return value_s * (1 + draws.uniform(-noise, noise))


def prefill_points(curve: PrefillCurve, noise: float, seed: int) -> list[PrefillPoint]:
    draws = random.Random(seed)
    wanted = [(new, 0) for new in LENGTHS] + list(APPENDS)
    return [
        PrefillPoint(new, cached, noisy(curve.seconds(new, cached), noise, draws))
        for new, cached in wanted
        for _ in range(5)
    ]


@settings(max_examples=20, deadline=None)
@given(
    constant_s=st.floats(1e-3, 0.05),
    per_token_s=st.floats(1e-6, 1e-3),
    squared=st.floats(1, 10),
    per_cached_token_s=st.floats(0, 1e-7),
    seed=st.integers(0, 100),
)
def test_a_known_prefill_curve_is_found_again_under_noise(
    constant_s: float, per_token_s: float, squared: float, per_cached_token_s: float, seed: int
) -> None:
    known = PrefillCurve(
        constant_s=constant_s,
        per_token_s=per_token_s,
        # So that both terms matter within the lengths: of half of that, this noise takes or adds
        # up to three tenths, which is no fault of the fit's.
        per_token_squared_s=squared * per_token_s / 8192,
        per_cached_token_s=per_cached_token_s,
    )
    found = fit_prefill(prefill_points(known, 0.03, seed))
    for new, cached in [(200, 0), (3000, 0), (16000, 0), (128, 8000), (512, 2000)]:
        assert found.seconds(new, cached) == pytest.approx(known.seconds(new, cached), rel=0.05)
    assert found.per_token_squared_s == pytest.approx(known.per_token_squared_s, rel=0.2)
    assert found.quality is not None
    assert found.quality.r_squared > 0.99
    assert found.cached_quality is not None
    assert found.cached_quality.points == 5 * len(APPENDS)


def test_what_only_the_prefiller_pays_is_found_apart() -> None:
    known = PrefillCurve(
        constant_s=0.03, cached_constant_s=0.005, per_token_s=1e-4, per_token_squared_s=1e-9
    )
    found = fit_prefill(prefill_points(known, 0.02, 1))
    assert found.constant_s == pytest.approx(0.03, rel=0.1)
    assert found.append_constant_s == pytest.approx(0.005, rel=0.3)
    assert found.seconds(0, 1) < found.seconds(0) / 3


def test_no_term_is_negative_even_where_points_bend_down() -> None:
    points = [PrefillPoint(new, 0, 0.01 + 1e-5 * new - 2e-11 * new * new) for new in LENGTHS]
    found = fit_prefill(points)
    assert found.per_token_squared_s == 0
    assert found.per_token_s == pytest.approx(1e-5, rel=0.1)


def test_points_that_follow_no_curve_are_refused() -> None:
    draws = random.Random(1)
    points = [PrefillPoint(new, 0, draws.uniform(0.01, 1)) for new in LENGTHS * 3]
    with pytest.raises(FitError, match=r"prefill: no curve fits, R\^2 is .* Measure again"):
        fit_prefill(points)


# Not the last: a curve may bend up there.
@pytest.mark.parametrize("wrong", range(6))
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_one_point_that_is_far_off_is_refused_whatever_the_others_say(
    wrong: int, factor: float
) -> None:
    points = [
        PrefillPoint(new, 0, (0.02 + 3e-5 * new) * (factor if index == wrong else 1))
        for index, new in enumerate(LENGTHS[:7])
    ]
    with pytest.raises(FitError, match="prefill: no curve fits"):
        fit_prefill(points)
    with pytest.raises(FitError, match="a point is more than 50% off; the worst, "):
        fit_prefill(points, min_r_squared=-1000.0)


def test_times_that_hardly_vary_need_no_r_squared() -> None:
    draws = random.Random(2)
    points = [HandoffPoint(n, noisy(0.02, 0.05, draws)) for n in (128, 512, 1024) for _ in range(9)]
    found = fit_handoff(points, 1024)
    assert found.quality is not None
    assert found.quality.r_squared < 0.5
    assert found.seconds(600) == pytest.approx(0.02, rel=0.05)


def test_too_few_lengths_are_refused() -> None:
    points = [PrefillPoint(new, 0, 0.1) for new in (100, 200, 300)] * 5
    with pytest.raises(FitError, match="3 different prompt lengths were measured; 4 are needed"):
        fit_prefill(points)


@settings(max_examples=20, deadline=None)
@given(
    constant_s=st.floats(1e-3, 0.05),
    per_sequence_s=st.floats(1e-5, 1e-3),
    per_kv_token_s=st.floats(1e-8, 1e-6),
    seed=st.integers(0, 100),
)
def test_a_known_decode_plane_is_found_again_under_noise(
    constant_s: float, per_sequence_s: float, per_kv_token_s: float, seed: int
) -> None:
    known = DecodeCurve(
        constant_s=constant_s, per_sequence_s=per_sequence_s, per_kv_token_s=per_kv_token_s
    )
    draws = random.Random(seed)
    points = [
        DecodePoint(b, b * each, noisy(known.step_s(b, b * each), 0.02, draws))
        for b in (1, 2, 4, 8, 16, 32)
        for each in (128, 1024, 4096, 8192)
        for _ in range(4)
    ]
    found = fit_decode(points)
    for batch, each in [(1, 500), (6, 3000), (32, 8000)]:
        assert found.step_s(batch, batch * each) == pytest.approx(
            known.step_s(batch, batch * each), rel=0.04
        )


def test_a_step_that_costs_nothing_when_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [DecodePoint(b, b * each, 1e-3 * b) for b in (1, 2, 4) for each in (100, 200, 300)]
    with pytest.raises(FitError, match="an iteration of nothing"):
        fit_decode(points)
    # What rounding leaves of nothing, as on some processors, is nothing.
    monkeypatch.setattr(fit, "_not_negative", lambda *_: (1e-19, 1e-3, 0.0))
    with pytest.raises(FitError, match="an iteration of nothing"):
        fit_decode(points)


def test_the_share_of_an_append_that_adds_to_an_iteration_is_found() -> None:
    prefill = PrefillCurve(constant_s=0.005, per_token_s=1e-4, per_token_squared_s=1e-9)
    decode = DecodeCurve(constant_s=0.005, per_sequence_s=1e-4, per_kv_token_s=1e-7)
    draws = random.Random(3)
    points = []
    for batch in (1, 4, 8):
        for new in (64, 128, 512):
            alone, adds = decode.step_s(batch, batch * 2000), prefill.marginal_s(new, 2000)
            for _ in range(5):
                seconds = noisy(alone + 0.6 * adds, 0.03, draws)
                points.append(MixedPoint(batch, batch * 2000, new, 2000, seconds))
    found = fit_interference(points, prefill, decode)
    assert found.prefill_share == pytest.approx(0.6, rel=0.05)


def test_what_images_add_to_prefills_is_found_again() -> None:
    prefill = PrefillCurve(constant_s=0.005, per_token_s=1e-4, per_token_squared_s=1e-9)
    points = [
        EncodingPoint(encoded, new, prefill.seconds(new) + 3e-3 * encoded)
        for encoded, new in ((64, 90), (256, 280), (1_024, 1_050))
    ]
    found = fit_encoding(points, prefill)
    assert found.per_token_s == pytest.approx(3e-3)
    # An encoder that takes no time shows only as noise.
    quick = [replace(one, seconds=0.999 * prefill.seconds(one.new_tokens)) for one in points]
    assert fit_encoding(quick, prefill).per_token_s == 0
    wild = [replace(one, seconds=one.seconds * 3**i) for i, one in enumerate(points)]
    with pytest.raises(FitError, match="encoding: no curve fits"):
        fit_encoding(wild, prefill)


def turns(direct_s: float, handed_off_s: float, drift: float = 0.0) -> list[TurnPoint]:
    """Of engines whose speed drifts from turn to turn."""
    found = []
    for number, first in enumerate((512, 1024, 2048, 4096)):
        slower = 1 + drift * number
        cold_s, append_s = slower * (0.05 + first * 5e-5), slower * 0.015
        found.append(TurnPoint(first, first // 128 * 128, 0, cold_s, cold_s + handed_off_s))
        found.append(TurnPoint(first + 128, 0, first, append_s, append_s + direct_s))
    return found


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_what_turns_take_beyond_their_engines_is_found_again(drift: float) -> None:
    found = fit_overhead(turns(0.004, 0.011, drift))
    assert found.direct_s == pytest.approx(0.004)
    assert found.handed_off_s == pytest.approx(0.011)
    assert found.quality is not None
    assert found.quality.r_squared == pytest.approx(1)
    assert found.quality.points == 8


def test_turns_that_take_now_this_and_now_that_have_no_overhead() -> None:
    points = turns(0.004, 0.011)
    wild = [replace(one, seconds=one.seconds * (1 + 3 * (i % 2))) for i, one in enumerate(points)]
    wild = [
        replace(one, seconds=one.seconds * (1 + 3 * (i // 2 % 2))) for i, one in enumerate(wild)
    ]
    with pytest.raises(FitError, match="overhead: no curve fits"):
        fit_overhead(wild)
    later = [point for point in points if point.cached_tokens]
    with pytest.raises(FitError, match="no turn was handed off"):
        fit_overhead(later)


# Tokens each 10 ms, and each 40 ms from 1 to 2 s.
_ANSWER = [*(n / 100 for n in range(101)), *(1 + n / 25 for n in range(1, 26)), 2.01, 2.02]


def test_a_stages_step_is_that_of_the_tokens_while_it_ran() -> None:
    point = stage_point(16, 0.9, 1.95, [_ANSWER, _ANSWER])
    assert (point.decode_sms, point.seconds) == (16, 0.9)
    assert point.step_s == pytest.approx(0.04)
    # One that is over between two tokens was beside a part of that step.
    assert stage_point(16, 0.01, 1.91, [_ANSWER]).step_s == pytest.approx(0.04)
    assert stage_point(16, 0.5, 0.9, [_ANSWER]).step_s == pytest.approx(0.01)


def test_a_stage_without_decodes_beside_it_is_refused() -> None:
    with pytest.raises(FitError, match="the decoder's lane was not used"):
        stage_point(16, 0.0, 1.95, [_ANSWER])
    for answer in (_ANSWER[120:], _ANSWER[:110], []):
        with pytest.raises(FitError, match="an answer did not decode all the"):
            stage_point(16, 0.9, 1.95, [_ANSWER, answer])
