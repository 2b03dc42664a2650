"""The budget of prefill beside decodes, and the line that caps it."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve_inside.policy import ChunkController, StepCost, kind_of


def run(
    controller: ChunkController,
    steps: int,
    base_s: float,
    token_s: float,
    wanted: int,
    now_s: float = 0.0,
) -> list[float]:
    """Steps of an engine with prefills of this size; return how long each took."""
    lasted = []
    for _ in range(steps):
        tokens = min(wanted, controller.allowed_tokens())
        if tokens < wanted:
            controller.was_cut()
        took_s = base_s + token_s * tokens
        now_s += took_s
        controller.step(took_s, tokens, now_s, decodes=4)
        lasted.append(took_s)
    return lasted


def test_it_finds_the_chunk_that_keeps_decodes_within_their_bound() -> None:
    controller = ChunkController(64, 8_192, late_s=0.05)
    run(controller, 50, 0.005, 1e-4, 0)
    lasted = run(controller, 200, 0.005, 1e-4, 100_000, 10.0)
    assert max(lasted) <= 0.05
    # And prefills get most of what that leaves: 0.045 s are 450 tokens.
    assert controller.allowed_tokens() >= 390


def test_the_bound_is_twice_a_step_without_prefills_and_at_least_a_lone_decodes() -> None:
    controller = ChunkController(64, 8_192)
    for number in range(12):
        # The first ones of an engine take longer. Those of several say nothing of it.
        controller.step(0.2 if number < 3 else 0.01, 0, 0.0, decodes=1)
        controller.step(0.015, 0, 0.0, decodes=2)
    for number in range(16):
        controller.step(0.015, 0, 1.0 + 0.015 * number, decodes=2)
    assert controller.late_s == pytest.approx(0.03)
    # That of a lone decode stays, by which SMs are reserved: fewer SMs would widen the other one.
    assert controller.alone_late_s == pytest.approx(0.02)


def test_many_decodes_do_not_leave_prefills_without_time() -> None:
    """Fifty of them take longer than twice one alone, whatever is prefilled beside them."""
    controller = ChunkController(64, 8_192, lone_s=0.01)
    run(controller, 300, 0.03, 1e-4, 100_000)
    assert controller.late_s == pytest.approx(0.06, rel=0.1)
    assert controller.allowed_tokens() >= 200


def test_calm_does_not_make_it_grow() -> None:
    controller = ChunkController(64, 8_192, late_s=0.05)
    run(controller, 1_000, 0.005, 1e-4, 0)
    assert controller.allowed_tokens() == 64
    # Nor do prefills which fit.
    run(controller, 1_000, 0.005, 1e-4, 60, 10.0)
    assert controller.budget_tokens == 64


def test_it_shrinks_when_steps_are_late_and_comes_back() -> None:
    controller = ChunkController(64, 1_024, late_s=0.05)
    run(controller, 400, 0.005, 1e-5, 4_000)
    assert controller.budget_tokens == 1_024
    run(controller, 100, 0.08, 1e-5, 4_000, 50.0)
    assert controller.budget_tokens == controller.allowed_tokens() == 64
    run(controller, 600, 0.005, 1e-5, 4_000, 100.0)
    assert controller.allowed_tokens() == 1_024


@given(
    st.lists(st.tuples(st.floats(0, 3.0), st.integers(0, 20_000), st.booleans()), max_size=200),
    st.integers(1, 512),
    st.integers(0, 16_000),
)
def test_whatever_happens_it_stays_within_its_bounds(
    steps: list[tuple[float, int, bool]], least: int, more: int
) -> None:
    controller = ChunkController(least, least + more)
    now_s, budgets = 0.0, [controller.budget_tokens]
    for lasted_s, tokens, cut in steps:
        assert least <= controller.allowed_tokens() <= least + more
        if cut:
            controller.was_cut()
        now_s += lasted_s
        controller.step(lasted_s, tokens, now_s, decodes=1)
        budgets.append(controller.budget_tokens)
    delta = max(1, (least + more) // 8)
    assert all(abs(after - before) <= delta for before, after in pairwise(budgets))


@given(st.floats(1e-3, 0.05), st.floats(1e-6, 1e-3), st.integers(0, 2**32))
def test_the_line_through_steps_on_a_line_is_that_line(
    base_s: float, token_s: float, seed: int
) -> None:
    cost, chance = StepCost(), random.Random(seed)
    for _ in range(60):
        tokens = chance.choice((0, 0, 64, 200, 512))
        cost.add(base_s + token_s * tokens, tokens)
    line = cost.line()
    assert line is not None
    assert line == (pytest.approx(base_s, rel=0.01), pytest.approx(token_s, rel=0.01))


def test_one_slow_step_on_a_busy_machine_changes_little_and_a_slower_engine_all() -> None:
    cost = StepCost()
    for number in range(200):
        cost.add(0.005 + 1e-4 * (tokens := 256 * (number % 2)), tokens)
    before = cost.affordable_tokens(0.05)
    cost.add(3.0, 256)
    after = cost.affordable_tokens(0.05)
    assert before is not None
    assert after is not None
    assert 0.7 * before < after < 1.3 * before
    for number in range(400):
        cost.add(0.01 + 1e-3 * (tokens := 256 * (number % 2)), tokens)
    assert cost.affordable_tokens(0.05) == pytest.approx(40, abs=2)


def test_from_equal_steps_nothing_is_concluded() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.add(0.02, 64)
    assert cost.line() is None
    assert cost.affordable_tokens(0.05) is None


def test_a_call_is_what_is_missing_of_it() -> None:
    assert kind_of(True, 3_000, 1, 256) == "decode"
    assert kind_of(False, 3_000, 256, 256) == "resume"
    assert kind_of(False, 3_000, 257, 256) == "cold"
    assert kind_of(False, 0, 10, 256) == "cold"
