"""The price of having a prompt prefilled elsewhere."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.history import History, TurnStats
from conserve.placement import (
    NOTHING_SHARED,
    Decoder,
    ElasticPlacement,
    EngineCosts,
    EngineLoad,
    Loads,
    Placement,
    Prefiller,
)
from conserve.placement.handing_over import HandingOver, Price

COSTS = EngineCosts(per_token_s=1e-3, prefill_share=0.75, handoff_per_token_s=1e-5)
HANDED_OVER, AT_HOME = Placement("d1", "p1"), Placement("d1", None)


@given(
    st.floats(0.0, 0.3),
    st.floats(0.0, 5e-5),
    st.floats(-0.2, 0.4),
    st.integers(0, 999),
)
def test_the_difference_is_the_price_and_a_wrong_estimate_is_none(
    constant_s: float, per_token_s: float, wrong: float, seed: int
) -> None:
    seen, draw = HandingOver(), random.Random(seed)
    for number in range(400):
        tokens = draw.randint(500, 20_000)
        estimated_s = 2e-4 * tokens + 0.5
        handed_over = number % 2 == 0
        seconds = (1 + wrong) * estimated_s + draw.gauss(0, 0.02)
        if handed_over:
            seconds += constant_s + per_token_s * tokens
        seen.took(seconds, estimated_s, tokens, handed_over=handed_over)
    for tokens in (1_000, 8_000, 18_000):
        paid_s = constant_s + per_token_s * tokens
        # The two prompts that count as seen from the start draw what is constant towards 0.
        assert seen.price().of(tokens) == pytest.approx(paid_s, abs=0.05 + 0.1 * paid_s)


def test_nothing_costs_nothing_and_nothing_is_ever_gained_by_it() -> None:
    assert HandingOver().price().of(8_000) == 0.0
    assert Price(0.1, 1e-5).of(0) == 0.0
    assert Price(-0.5, 1e-5).of(10_000) == 0.0
    assert Price(0.1, 1e-5).of(10_000) == pytest.approx(0.2)


def test_what_was_seen_before_others_hardly_counts() -> None:
    seen = HandingOver()
    for _ in range(50):
        seen.took(3.0, 2.0, 8_000, handed_over=True)
    assert seen.price().of(8_000) > 0.9
    for _ in range(200):
        seen.took(2.1, 2.0, 8_000, handed_over=True)
    assert seen.price().of(8_000) == pytest.approx(0.1, abs=0.05)


def test_an_accident_counts_no_more_than_what_takes_four_times_as_long() -> None:
    one, other = HandingOver(), HandingOver()
    one.took(600.0, 2.0, 8_000, handed_over=True)
    other.took(8.0, 2.0, 8_000, handed_over=True)
    assert one.price() == other.price()


def placed(
    loads: Loads, where: Placement, late_s: float, at_s: float, arrives: bool = True
) -> None:
    """Place a prompt of 4,000 tokens, which is answered later than expected."""
    history = History("c", 1, at_s, at_s, decoder_id="d1", promised=True)
    loads.placed(history.id, 4_000, where, NOTHING_SHARED, at_s)
    estimated_s = 4.0 if where == AT_HOME else 4.04
    ended_s = at_s + estimated_s + late_s + 7.0
    loaded = 3_840 if where == HANDED_OVER and arrives else 0
    loads.done("p1", history.id)
    loads.turn_ended(history, TurnStats(4_000, 100, 0, loaded, decode_s=7.0), ended_s)


def test_a_price_that_was_paid_keeps_prompts_at_home() -> None:
    homes, pool = [Decoder("d1", 100_000, 4_000, 1)], [Prefiller("p1")]

    def choice(loads: Loads, decodes: int) -> Placement | None:
        loads.says("d1", EngineLoad(decodes=decodes, step_s=0.01), 1_000.0)
        return ElasticPlacement(loads).place(4_000, homes, pool, now_s=1_000.0)

    # One decode that would wait for three seconds is reason enough to hand it over.
    assert choice(Loads(COSTS), 1) == HANDED_OVER
    dear, as_late = Loads(COSTS), Loads(COSTS)
    for number in range(40):
        at_s = 20.0 * number
        placed(dear, HANDED_OVER, 4.0, at_s)
        placed(dear, AT_HOME, -0.1, at_s)
        placed(as_late, HANDED_OVER, 0.7, at_s)
        placed(as_late, AT_HOME, 0.7, at_s)
    assert dear.price().of(4_000) == pytest.approx(4.0, abs=0.3)
    assert choice(dear, 1) == AT_HOME
    # Two would wait for longer than it costs.
    assert choice(dear, 2) == HANDED_OVER
    # If all are late alike, handing over is not the reason.
    assert as_late.price().of(4_000) == pytest.approx(0.0, abs=0.02)
    assert choice(as_late, 1) == HANDED_OVER


def test_what_did_not_arrive_or_did_not_end_says_nothing() -> None:
    loads = Loads(COSTS)
    placed(loads, HANDED_OVER, 4.0, 0.0, arrives=False)
    history = History("cut", 1, 0.0, 0.0, decoder_id="d1", promised=True)
    loads.placed(history.id, 4_000, HANDED_OVER, NOTHING_SHARED, 20.0)
    loads.turn_ended(history, None, 40.0)
    # Its next turn has nothing to do with that; nor is it known when this one's token came.
    loads.turn_ended(history, TurnStats(4_000, 100, 0, 3_840, decode_s=7.0), 90.0)
    loads.placed(history.id, 4_000, HANDED_OVER, NOTHING_SHARED, 100.0)
    loads.turn_ended(history, TurnStats(4_000, 100, 0, 3_840), 120.0)
    assert loads.price() == Price()


def test_prompts_that_wait_in_line_say_nothing_of_their_way() -> None:
    late = Loads(COSTS)
    for number in range(40):
        at_s = 20.0 * number
        late.says("p1", EngineLoad(prefill_tokens=2_000), at_s)
        placed(late, HANDED_OVER, 4.0, at_s)
    assert late.price() == Price()
    late.says("p1", EngineLoad(prefill_tokens=100), 800.0)
    placed(late, HANDED_OVER, 4.0, 800.0)
    assert late.price().of(4_000) > 0.5


def test_prompts_that_never_end_are_not_kept_in_mind_for_ever() -> None:
    loads = Loads(COSTS)
    for number in range(3_000):
        loads.placed(str(number), 4_000, HANDED_OVER, NOTHING_SHARED, 5.0 * number)
    for number in range(3_000):
        history = History(str(number), 1, 0.0, 0.0, decoder_id="d1", promised=True)
        loads.turn_ended(history, TurnStats(4_000, 100, 0, 3_840, decode_s=0.0), 20_000.0)
        if number == 1_000:
            assert loads.price() == Price()
    assert loads.price() != Price()
