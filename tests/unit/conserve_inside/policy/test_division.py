"""Divisions of a GPU's SMs among stages, against what Nova prints and against brute force."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.capacity.profile import StageCurves, StageSize, load_profile
from conserve_inside.policy import DecodeShare
from conserve_inside.policy.division import Division, divide, pareto_front, plan_stages

_SECONDS = st.floats(1e-3, 10)
_SIZES = st.lists(
    st.tuples(st.integers(1, 60), _SECONDS, _SECONDS, _SECONDS, _SECONDS),
    min_size=2,
    max_size=6,
    unique_by=lambda size: size[0],
)


def curves_of(
    sizes: list[tuple[int, float, float, float, float]], output_tokens: float
) -> StageCurves:
    rows = [dict(zip(StageSize.model_fields, size, strict=True)) for size in sorted(sizes)]
    return StageCurves.model_validate({"sms": 84, "output_tokens": output_tokens, "sizes": rows})


@pytest.fixture
def a6000() -> StageCurves:
    stages = load_profile("a6000-cogagent").stages
    assert stages is not None
    return stages


def test_the_papers_shares_follow_from_its_knees(a6000: StageCurves) -> None:
    plan = plan_stages(a6000)
    assert plan.within_bound
    assert plan.shares["encode"] == DecodeShare(24, 12, 4)
    assert plan.shares["prefill"] == DecodeShare(30, 12, 6)
    sides = [(one.encode_sms, one.prefill_sms) for one in plan.by_pending]
    assert sides == [(24, 30), (20, 24), (16, 18), (12, 12)]
    # Equation 5 follows the front, as figure 6(b) has it.
    assert set(plan.by_pending) <= set(plan.front)
    assert plan.front[0] == plan.best
    assert len(plan.divisions) == 21 * 21


def test_a_request_takes_what_the_equations_say() -> None:
    beside_encode = StageSize(
        decode_sms=16,
        encode_s=0.9,
        prefill_s=7.0,
        decode_beside_encode_s=0.04,
        decode_beside_prefill_s=7.0,
    )
    beside_prefill = StageSize(
        decode_sms=24,
        encode_s=7.0,
        prefill_s=0.3,
        decode_beside_encode_s=7.0,
        decode_beside_prefill_s=0.02,
    )
    division = divide(beside_encode, beside_prefill, output_tokens=50)
    assert (division.encode_sms, division.prefill_sms) == (16, 24)
    assert division.latency_s == pytest.approx(0.9 + 0.3 + 50 * (0.75 * 0.04 + 0.25 * 0.02))
    assert division.throughput_per_s == pytest.approx(1 / 1.2)
    assert division.tbt_s == 0.04


def test_a_tighter_bound_leaves_decodes_more(a6000: StageCurves) -> None:
    assert [plan_stages(a6000, ms / 1e3).least_sms for ms in (80, 60, 40, 30)] == [12, 16, 22, 30]
    # A step may be as long as the bound.
    (size,) = (one for one in a6000.sizes if one.decode_sms == 22)
    step_s = max(size.decode_beside_encode_s, size.decode_beside_prefill_s)
    assert plan_stages(a6000, step_s).least_sms == 22
    # Equation 3 keeps to it as well: beside encodes 24 would have been best.
    assert plan_stages(a6000, 0.03).shares["encode"] == DecodeShare(30, 30, 0)


def test_shares_are_steps_that_the_sizes_have(a6000: StageCurves) -> None:
    sizes = {size.decode_sms: size for size in a6000.sizes}

    def shares(*sizes_sms: int) -> tuple[DecodeShare, list[int]]:
        some = tuple(sizes[sms] for sms in sizes_sms)
        plan = plan_stages(a6000.model_copy(update={"sizes": some}))
        return plan.shares["prefill"], [one.prefill_sms for one in plan.by_pending]

    # A third of 16 is rounded up to 8, and decodes have S_min earlier.
    assert shares(16, 24, 32) == (DecodeShare(32, 16, 8), [32, 24, 16, 16])
    assert shares(16, 32) == (DecodeShare(32, 16, 16), [32, 16, 16, 16])
    # 24 and 18 are no sizes here.
    assert shares(12, 14, 30) == (DecodeShare(30, 12, 6), [30, 30, 30, 12])


@given(_SIZES, st.floats(1, 200), _SECONDS)
def test_every_plan_keeps_its_promises(
    sizes: list[tuple[int, float, float, float, float]], output_tokens: float, bound_s: float
) -> None:
    curves = curves_of(sizes, output_tokens)
    plan = plan_stages(curves, bound_s)
    rows = {size.decode_sms: size for size in curves.sizes}
    steps = {
        sms: max(size.decode_beside_encode_s, size.decode_beside_prefill_s)
        for sms, size in rows.items()
    }
    quick = [sms for sms, step_s in steps.items() if step_s <= bound_s]
    assert plan.within_bound == bool(quick)
    assert plan.least_sms == (min(quick) if quick else max(rows))
    allowed = [sms for sms in rows if sms >= plan.least_sms]
    least_s = min(
        divide(rows[encode], rows[prefill], output_tokens).latency_s
        for encode, prefill in product(allowed, repeat=2)
    )
    assert plan.best.latency_s == least_s
    for share in plan.shares.values():
        assert share.least_sms == plan.least_sms <= share.most_sms
        assert share.decode_sms(4) == plan.least_sms
    for one in plan.by_pending:
        assert {one.encode_sms, one.prefill_sms} <= set(allowed)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=20))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    divisions = [Division(0, 0, float(late), float(many), 0.0) for late, many in points]
    front = pareto_front(divisions)
    for one in divisions:
        beaten = any(
            other.latency_s <= one.latency_s
            and other.throughput_per_s >= one.throughput_per_s
            and other != one
            for other in divisions
        )
        assert (one in front) != beaten
    assert sorted(front, key=lambda one: one.latency_s) == front
    assert len(set(front)) == len(front)
