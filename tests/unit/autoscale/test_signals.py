"""What is needed, by each signal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.autoscaler import ConversationFlow, Pool, PrefillLoad, Rate
from autoscale.capacity.profile import PrefillCurve

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


@settings(max_examples=50, deadline=None)
@given(
    held=st.floats(0, 1e7),
    waiting=st.floats(0, 1e6),
    more=st.floats(0, 1e6),
    arrivals=st.integers(0, 30),
)
def test_decoders_needed_grow_with_every_signal(
    held: float, waiting: float, more: float, arrivals: int
) -> None:
    def need(held: float, waiting: float, arrivals: int, lifetime_s: float) -> float:
        flow = ConversationFlow(60)
        flow.ended(lifetime_s, 9_000)
        for _ in range(arrivals):
            flow.arrived(1)
        return flow.need(Pool(100_000, held, waiting), 2).replicas

    plain = need(held, waiting, arrivals, 30)
    assert need(held + more, waiting, arrivals, 30) >= plain
    assert need(held, waiting + more, arrivals, 30) >= plain
    assert need(held, waiting, arrivals + 1, 30) >= plain
    assert need(held, waiting, arrivals, 60) >= plain


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
