"""How many replicas: what is needed by each signal, the number that follows, and by settings."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.autoscaler import (
    Autoscaler,
    ConversationFlow,
    Limits,
    Need,
    Pool,
    PrefillLoad,
    Rate,
    Scaling,
    make_autoscaler,
    scale,
)
from autoscale.capacity.profile import PrefillCurve
from conserve.placement import Decoder, Prefiller
from conserve.settings import Settings

CURVE = PrefillCurve(constant_s=0.1, per_token_s=1e-4, per_token_squared_s=1e-8)


def test_a_rate_forgets_what_is_older_than_its_window() -> None:
    rate = Rate(10)
    for at_s in range(5):
        rate.add(2, at_s)
    assert rate.per_s(4) == 1.0
    assert rate.per_s(11.5) == pytest.approx(0.6)
    assert rate.per_s(100) == 0.0


def test_prefillers_are_needed_for_the_curves_seconds_not_for_tokens() -> None:
    long, short = PrefillLoad(CURVE, 10), PrefillLoad(CURVE, 10)
    long.arrived(20_000, 0)
    for _ in range(10):
        short.arrived(2_000, 0)
    assert long.need(0, 1).replicas == pytest.approx((0.1 + 2 + 4) / 10)
    assert short.need(0, 1).replicas == pytest.approx(10 * (0.1 + 0.2 + 0.04) / 10)
    assert long.need(0, 1).signal == "input_tokens"


def test_what_is_queued_has_to_be_worked_off_besides() -> None:
    load = PrefillLoad(CURVE, 10)
    load.arrived(20_000, 0)
    assert load.need(10_000, 1).replicas == pytest.approx(0.61 + 6.1 / 2 / 10)
    # The window is empty, and the queue is not.
    assert load.need(1_000, 50).replicas == pytest.approx((0.1 + 0.1 + 0.01) / 10)
    assert load.need(0, 50).replicas == 0


def test_a_capped_prefiller_takes_longer() -> None:
    load = PrefillLoad(CURVE, 10, slowdown=1.5)
    load.arrived(20_000, 0)
    assert load.need(0, 1).replicas == pytest.approx(1.5 * 0.61)


def test_occupancy_or_inequality_2_whichever_needs_more() -> None:
    flow = ConversationFlow(10)
    for _ in range(20):
        flow.arrived(5)
    pool = Pool(capacity_tokens=100_000, held_tokens=150_000, waiting_tokens=20_000)
    held = flow.need(pool, 6)
    assert (held.replicas, held.signal) == (pytest.approx(1.7), "occupancy")
    # R = 2/s, W = 40 s, B = 100,000 / 5,000 = 20 slots: N = 4.
    flow.ended(30, 4_000)
    flow.ended(50, 6_000)
    coming = flow.need(pool, 6)
    assert (coming.replicas, coming.signal) == (pytest.approx(4.0), "arrivals")


# --- From needed to wanted replicas: bounded, steady, and never too few for long ------------------

limits = st.builds(
    lambda least, more, down, target, up, delay_s, cool_s: Limits(
        least=least,
        most=least + more,
        target=target * up,
        up_at=up,
        down_at=down * target * up,
        down_delay_s=delay_s,
        cool_down_s=cool_s,
    ),
    st.integers(1, 5),
    st.integers(0, 30),
    st.floats(0.1, 0.95),
    st.floats(0.3, 0.95),
    st.floats(0.5, 1),
    st.floats(0, 100),
    st.floats(0, 100),
)
needs = st.floats(0, 100)
signals = st.lists(st.none() | needs | st.sampled_from([math.nan, math.inf]), max_size=40)
# Where no delay is looked at.
AT_ONCE = Limits(1, 10, down_delay_s=0, cool_down_s=0)


def run(limits: Limits, start: int, needed: list[float | None], every_s: float = 10.0) -> list[int]:
    state, seen = Scaling(start), []
    for step, need in enumerate(needed):
        state = scale(limits, state, need, step * every_s)
        seen.append(state.replicas)
    return seen


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(0, 60), needed=signals)
def test_never_outside_the_bounds(limits: Limits, start: int, needed: list[float | None]) -> None:
    assert all(limits.least <= n <= limits.most for n in run(limits, start, needed))


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(1, 35), needed=needs)
def test_a_constant_signal_changes_the_number_at_most_once(
    limits: Limits, start: int, needed: float
) -> None:
    start = min(max(start, limits.least), limits.most)
    seen = [start, *run(limits, start, [needed] * 30)]
    assert sum(a != b for a, b in pairwise(seen)) <= 1


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(1, 35), needed=needs, gap=st.integers(1, 20))
def test_after_missing_data_it_ends_where_it_would_have_been(
    limits: Limits, start: int, needed: float, gap: int
) -> None:
    steady = run(limits, start, [needed] * 30)
    broken = run(limits, start, [needed] * 3 + [None] * gap + [needed] * 30)
    assert broken[-1] == steady[-1]
    # And without data nothing moves.
    assert len(set(broken[2 : 3 + gap])) == 1


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(1, 35), needed=needs)
def test_it_settles_where_the_target_is_kept_if_the_bounds_allow(
    limits: Limits, start: int, needed: float
) -> None:
    settled = run(limits, start, [needed] * 30)[-1]
    assert needed <= limits.up_at * settled or settled == limits.most
    fewer = math.ceil(needed / limits.target)
    assert not (needed < limits.down_at * settled and max(fewer, limits.least) < settled)


def test_it_goes_up_at_once_and_before_saturation() -> None:
    assert run(Limits(1, 5), 1, [0.84, 0.86]) == [1, 2]
    assert run(Limits(1, 5), 1, [2.0]) == [3]


def test_it_goes_down_only_after_a_low_spell_without_a_break() -> None:
    slow = Limits(1, 5, down_delay_s=30, cool_down_s=0)
    assert run(slow, 3, [0.1] * 4) == [3, 3, 3, 1]
    assert run(slow, 3, [0.1, 0.1, 2.0, 0.1, 0.1, 0.1, 0.1]) == [3] * 6 + [1]
    assert run(slow, 3, [0.1, 0.1, None, 0.1, 0.1, 0.1, 0.1]) == [3] * 6 + [1]


def test_it_cools_down_after_going_up() -> None:
    cool = Limits(1, 5, down_delay_s=0, cool_down_s=25)
    assert run(cool, 1, [2.0, 0.1, 0.1, 0.1]) == [3, 3, 3, 1]


def test_between_the_thresholds_nothing_happens() -> None:
    assert run(AT_ONCE, 2, [1.05, 1.4, 1.69, 1.01]) == [2] * 4


def test_why_says_what_was_needed() -> None:
    assert scale(AT_ONCE, Scaling(1), 1.3, 0).why == "1.30 needed of 1"
    assert scale(AT_ONCE, Scaling(10), 30.0, 0).why == "30.00 needed, and 10 is the most"
    assert scale(AT_ONCE, Scaling(1), None, 0).why == "nothing observed"
    assert scale(replace(AT_ONCE, down_delay_s=9), Scaling(4), 0.1, 0).why.endswith("waiting")


# --- Both roles' numbers --------------------------------------------------------------------------


def decoders(*held_tokens: int) -> list[Decoder]:
    return [
        Decoder(f"d{number}", 10_000, held, conversations=1)
        for number, held in enumerate(held_tokens)
    ]


def need_of(autoscaler: Autoscaler) -> Need:
    need = autoscaler.wanted["decoder"].need
    assert need is not None
    return need


def test_a_conversation_that_fits_nowhere_makes_one_more_wanted_and_no_further() -> None:
    autoscaler = Autoscaler({"decoder": Limits(1, 8)}, {"decoder": 2}, None, 30)
    # 4,500 tokens fit on neither, and there is room for 8,000 in all.
    for now_s in range(5):
        autoscaler.decide(decoders(6_000, 6_000), [], 4_500, now_s)
        assert autoscaler.replicas("decoder") == 3
    assert need_of(autoscaler).signal == "no room"
    autoscaler.decide(decoders(6_000, 6_000, 4_500), [], 0, 6)
    assert autoscaler.replicas("decoder") == 3


def test_what_a_predecessor_wanted_holds_for_the_cool_down() -> None:
    limits = Limits(1, 4, down_delay_s=5, cool_down_s=20)
    autoscaler = Autoscaler({"decoder": limits}, {"decoder": 1, "prefiller": 1}, None, 30)
    autoscaler.adopt("decoder", 3, 100)
    autoscaler.adopt("prefiller", 3, 100)  # Does not scale.
    autoscaler.adopt("decoder", 9, 100)  # Of other settings.
    seen = []
    for now_s in range(100, 130):
        autoscaler.decide(decoders(100, 100, 100), [], 0, now_s)
        seen.append(autoscaler.replicas("decoder"))
    assert seen == [3] * 20 + [1] * 10
    assert autoscaler.replicas("prefiller") == 1


def test_prefillers_that_host_have_their_part_of_the_need() -> None:
    """Two decoders and a prefiller, all as full: two more decoders would be one too many."""
    autoscaler = Autoscaler({"decoder": Limits(1, 8)}, {"decoder": 2, "prefiller": 1}, None, 30)
    hosts = decoders(9_000, 9_000, 9_000)
    autoscaler.decide(hosts, [Prefiller("d2")], 0, 1)
    assert need_of(autoscaler).replicas == pytest.approx(1.8)
    assert autoscaler.replicas("decoder") == 3
    # A prompt that fits nowhere makes one more wanted, as many as hosts there are.
    autoscaler = Autoscaler({"decoder": Limits(1, 8)}, {"decoder": 2, "prefiller": 1}, None, 30)
    autoscaler.decide(decoders(1_000, 1_000, 1_000), [Prefiller("d2")], 9_500, 1)
    assert autoscaler.replicas("decoder") == 3
    # Where prefillers alone are left, decoders are wanted for all of it.
    autoscaler.decide(decoders(9_000), [Prefiller("d0")], 0, 2)
    assert need_of(autoscaler).replicas == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("tier", "slowdown"),
    [
        ({}, 1.0),
        ({"power_cap": 300}, 1.0),
        ({"power_cap": 200}, 1.14),
        ({"power_cap": "66.7%"}, 1.14),
        # Between two caps that are known, and below all of them: the slower.
        ({"power_cap": 250}, 1.14),
        ({"power_cap": 150}, 1.14),
    ],
)
def test_capped_prefillers_are_taken_for_slower(tier: dict[str, Any], slowdown: float) -> None:
    chosen = Settings(
        model="Qwen/Qwen3-0.6B",
        profile="a40-qwen3-0.6b",
        placement="conversation",
        tiers={"fast": {"resource": "fast", **tier}},  # type: ignore[dict-item]
        prefillers={"max_replicas": 2, "tier": "fast"},  # type: ignore[arg-type]
    )
    load = make_autoscaler(chosen)._load
    assert load is not None
    assert load._slowdown == pytest.approx(slowdown, abs=0.01)
