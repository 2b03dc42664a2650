"""Engines' work, as far as it is known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.history import History
from conserve.placement import (
    NOTHING_SHARED,
    EngineLoad,
    Loads,
    Placement,
    Step,
)
from conserve.placement.engine_costs import EngineCosts
from conserve.placement.load import FirstPrompts, Work

# A token takes a millisecond.
COSTS = EngineCosts(per_token_s=1e-3, step_s=0.01, per_sequence_s=5e-4)
AT_HOME = Placement("d", None)


def backlog_s(loads: Loads, now_s: float, engine_id: str = "d") -> float:
    return loads.work(engine_id, now_s).backlog_s


def send(loads: Loads, history_id: str, tokens: int, now_s: float) -> None:
    loads.placed(history_id, tokens, AT_HOME, NOTHING_SHARED, now_s)


def test_what_an_engine_says_takes_the_place_of_what_was_sent_before() -> None:
    loads = Loads(COSTS)
    send(loads, "a", 2_000, 10.0)
    loads.says("d", EngineLoad(prefill_tokens=500, decodes=3, step_s=0.02), 10.1)
    send(loads, "b", 300, 10.1)
    work = loads.work("d", 10.1)
    assert (work.backlog_tokens, work.decodes, work.step_s) == (800, 3, 0.02)
    loads.done("d", "a")
    assert backlog_s(loads, 10.1) == pytest.approx(0.8)


@given(
    st.lists(
        st.tuples(st.integers(1, 3_000), st.floats(0, 5), st.booleans()), min_size=1, max_size=12
    )
)
def test_the_backlog_is_that_of_an_engine_that_serves_in_order(
    steps: list[tuple[int, float, bool]],
) -> None:
    """Compared with a queue that is emptied a millisecond at a time."""
    loads, queue, now_s = Loads(COSTS), {}, 0.0
    for number, (tokens, then_s, drops) in enumerate(steps):
        send(loads, str(number), tokens, now_s)
        queue[str(number)] = tokens / 1000
        if drops:
            gone = next(iter(queue))
            for engine in ("elsewhere", "d", "d"):
                loads.done(engine, gone)
            del queue[gone]
        now_s += then_s
        left_s = then_s
        for name in list(queue):
            served_s = min(left_s, queue[name])
            left_s -= served_s
            queue[name] -= served_s
            if queue[name] <= 1e-9:
                del queue[name]
        assert backlog_s(loads, now_s) == pytest.approx(sum(queue.values()), abs=1e-6)


def test_what_work_takes_is_learned_from_iterations_and_kept() -> None:
    loads = Loads()
    slow = tuple(Step(0.01 + tokens / 250, tokens, tokens**2) for tokens in (200, 500, 900) * 10)
    loads.says("d", EngineLoad(prefill_tokens=500, steps=slow), 1.0)
    assert backlog_s(loads, 1.0) == pytest.approx(2.0, rel=0.1)
    before = loads.work("d", 1.0).costs
    # Silence changes nothing, however long it is; nor do reports that say nothing.
    loads.says("d", EngineLoad(), 3_600.0)
    assert loads.work("d", 9_999.0).costs == before
    send(loads, "a", 500, 3_600.0)
    assert backlog_s(loads, 3_600.0) == pytest.approx(2.0, rel=0.1)


def test_engines_of_one_kind_learn_from_each_other_and_of_others_they_do_not() -> None:
    loads = Loads(COSTS)
    for name, kind in (("d1", "a"), ("d2", "a"), ("d3", "b")):
        loads.joined(name, kind)
    slow = tuple(Step(tokens / 250, tokens, tokens**2) for tokens in (200, 500, 900) * 10)
    loads.says("d1", EngineLoad(steps=slow), 1.0)
    for name in ("d2", "d3"):
        loads.says(name, EngineLoad(prefill_tokens=1_000), 1.0)
    assert backlog_s(loads, 1.0, "d2") == pytest.approx(4.0, rel=0.1)
    assert backlog_s(loads, 1.0, "d3") == pytest.approx(1.0)


def test_what_a_handoff_took_at_an_engines_start_is_what_it_takes() -> None:
    loads = Loads(COSTS)
    loads.joined("d", "kind", [(300, 0.05), (1_500, 0.11)])
    costs = loads.work("d", 0.0).costs
    assert (costs.handoff_s(0), costs.handoff_s(900)) == (0, pytest.approx(0.08))
    assert costs.handoff_s(3_000) == pytest.approx(0.185)
    # Longer ones never take less, nor any less than none.
    loads.joined("e", "other", [(300, 0.05), (1_500, 0.01)])
    assert loads.work("e", 0.0).costs.handoff_s(10_000) == pytest.approx(0.03)
    loads.says("d", EngineLoad(steps=(Step(0.5, 500, 500**2),)), 1.0)
    assert loads.work("d", 1.0).costs.handoff_s(900) == pytest.approx(0.08)


def test_of_engines_of_a_kind_the_one_that_was_disturbed_least_says_what_a_handoff_takes() -> None:
    """At the price of a disturbed engine no prompt would be handed over, so none would
    correct it.
    """
    loads = Loads(COSTS)
    loads.joined("d1", "a", [(300, 0.05), (1_500, 0.11)])
    loads.joined("d2", "a", [(300, 0.90), (1_500, 0.10)])
    loads.joined("d3", "a")
    loads.joined("e", "b", [(300, 1.0), (1_500, 1.0)])
    for name in ("d1", "d2", "d3"):
        assert loads.work(name, 0.0).costs.handoff_s(300) == pytest.approx(0.05)
        assert loads.work(name, 0.0).costs.handoff_s(1_500) == pytest.approx(0.10)
    assert loads.work("e", 0.0).costs.handoff_s(300) == pytest.approx(1.0)


def test_tokens_take_as_long_as_those_that_have_come_of_late() -> None:
    loads = Loads(EngineCosts(per_token_s=1e-3, per_pair_s=1e-6))
    # Appends to long histories take longer than the same tokens at a prompt's beginning.
    loads.computed("d", 100, 10_000, 1.0)
    loads.says("d", EngineLoad(prefill_tokens=200), 1.0)
    assert backlog_s(loads, 1.0) == pytest.approx(2 * (0.1 + 1e-6 * 100 * 20_100))


def test_shares_and_rates_fade() -> None:
    loads = Loads(COSTS)
    for second in range(300):
        send(loads, str(second), 500, float(second))
        loads.turn_came(f"c{second % 2}", "d", float(second))
        loads.computed("d", 100, 900, float(second))
    work = loads.work("d", 299.0)
    assert work.turns_per_s == pytest.approx(2.0, rel=0.05)
    assert work.append_share == pytest.approx(0.1, rel=0.05)
    assert work.append_s == pytest.approx(0.1)
    first = loads.first_prompts(299.0)
    assert first.engines == pytest.approx(0.5, rel=0.05)
    assert first.per_s == pytest.approx(1.0, rel=0.05)
    assert loads.first_prompts(1299.0).engines < 0.001
    assert loads.work("d", 1299.0).turns_per_s < 0.001
    # Clocks may be set back.
    assert loads.work("d", 0.0).turns_per_s < 0.001


def test_the_prompt_that_runs_when_one_runs_is_a_long_one() -> None:
    loads = Loads(COSTS)
    assert loads.first_prompts(0.0) == FirstPrompts()
    for tokens, placement in ((500, Placement("d", None)), (1_500, Placement("d", "p"))):
        loads.placed(str(tokens), tokens, placement, NOTHING_SHARED, 0.0)
    first = loads.first_prompts(0.0)
    # Three quarters of the time are the longer one's.
    assert (first.tokens, first.seconds) == (1_250, pytest.approx(1.25))
    assert first.engines == pytest.approx(2.0 / 60)


def test_turns_that_come_wait_for_what_is_left_of_a_prefill() -> None:
    """Compared with many draws of when each conversation sends its next turn."""
    rng = random.Random(3)
    work = Work(COSTS, turns_per_s=1.5, conversations=3)
    for held_up_s in (0.1, 2.0, 20.0):
        waits = [max(0.0, held_up_s - rng.expovariate(0.5)) for _ in range(200_000)]
        expected_s = 3 * sum(waits) / len(waits)
        assert work.coming_wait_s(held_up_s) == pytest.approx(expected_s, rel=0.03)
    # A short time, in which each turn is of another conversation.
    assert work.coming_wait_s(1e-5) == pytest.approx(1.5 * 1e-10 / 2, rel=1e-3)
    # Without conversations no turn is held up.
    assert Work(COSTS, turns_per_s=1.5).coming_wait_s(2.0) == 0
    assert Work(COSTS, conversations=3).coming_wait_s(2.0) == 0


def test_who_has_left_sends_no_turn() -> None:
    loads = Loads(COSTS)
    for name in ("a", "b", "c"):
        loads.turn_came(name, "d", 10.0)
    loads.left("b", "d")
    loads.left("b", "d")
    loads.left("a", "elsewhere")
    work = loads.work("d", 10.0)
    # The rate is as it was: where some end, others begin.
    assert (work.conversations, work.turns_per_s) == (2, pytest.approx(0.1))
    loads.turn_came("a", "d", 100.0)
    assert loads.work("d", 159.0).conversations == 2
    assert loads.work("d", 161.0).conversations == 1
    assert loads.work("d", 251.0).conversations == 0


def test_what_a_prefiller_has_lent_is_kept_in_mind_for_ten_seconds() -> None:
    loads = Loads(COSTS)
    for at_s in (0.0, 6.0):
        loads.placed(str(at_s), 1_000, Placement("d", "p"), NOTHING_SHARED, at_s)
    assert loads.work("p", 6.0).lent_tokens == 2_000
    assert loads.work("p", 11.0).lent_tokens == 1_000
    assert loads.work("d", 6.0).lent_tokens == 0


def test_what_a_later_turn_appends_waits_at_its_home() -> None:
    loads = Loads(COSTS)
    history = History("b", 1, 0.0, 0.0, home="d1", held_tokens=500)
    loads.appended(history, 3_500, 1.0, 0)
    here = loads.work("d1", 1.0)
    assert (here.backlog_tokens, here.lent_tokens) == (3_000, 0)
    # What a decoder computes itself counts when it is done.
    assert here.append_share == 0
    loads.done("d1", "b")
    assert loads.work("d1", 1.0).backlog_tokens == 0


def test_nothing_is_known_of_an_engine_that_is_gone() -> None:
    loads = Loads(COSTS)
    loads.says("d", EngineLoad(9, 9, 9.0), 1.0)
    send(loads, "a", 100, 1.0)
    loads.gone("d")
    loads.gone("d")
    assert loads.work("d", 1.0) == Loads(COSTS).work("d", 1.0)


def test_what_engines_took_at_their_starts_makes_none_of_them_look_faster() -> None:
    """They start together, and the last one has the machine to itself."""
    loads = Loads(COSTS)
    for name, slower in (("d1", 2.0), ("d2", 1.0)):
        loads.joined(name, "kind")
        start = tuple(Step(slower * tokens / 1000, tokens, tokens**2) for tokens in (300, 1500))
        loads.says(name, EngineLoad(steps=(*start, Step(0.01 * slower, decodes=1))), 1.0)
    for name in ("d1", "d2"):
        loads.says(name, EngineLoad(), 2.0)
    assert loads.work("d1", 2.0).costs == loads.work("d2", 2.0).costs
    served = tuple(Step(2 * tokens / 1000, tokens, tokens**2) for tokens in (300, 1500) * 9)
    loads.says("d1", EngineLoad(steps=served), 3.0)
    assert loads.work("d1", 3.0).costs.per_token_s > 1.2 * loads.work("d2", 3.0).costs.per_token_s
