"""ThunderAgent's rules, each in the smallest case that shows it."""

import pytest

from conserve_lab.simulate.rivals import Program, ThunderAgent
from tests.unit.conserve_lab.simulate.rivals.stub import StubEngine, acting, reasoning

_BUFFER = 100


def _place(rival: ThunderAgent, program: Program) -> None:
    """Have a program begin, and be what it is then."""
    was, turns, tokens = program.reasoning, program.turns, program.tokens
    program.reasoning, program.turns, program.tokens = True, 1, 1
    program.engine_id = rival.route(program, 0.0)
    assert program.engine_id is not None
    program.reasoning, program.turns, program.tokens = was, turns, tokens


def _one_engine(capacity_tokens: int, *programs: Program) -> ThunderAgent:
    """They began when there was room."""
    engine = StubEngine(10**9)
    rival = ThunderAgent({"e": engine})
    for program in programs:
        _place(rival, program)
    engine.capacity_tokens = capacity_tokens
    return rival


def test_a_new_program_goes_where_the_fewest_tokens_are() -> None:
    rival = ThunderAgent({"a": StubEngine(), "b": StubEngine()})
    _place(rival, acting("long", 5_000))
    assert rival.route(reasoning("one", 100, turns=1), 0.0) == "b"


def test_a_new_program_waits_where_it_does_not_fit_or_others_wait() -> None:
    rival = _one_engine(10_000, acting("there", 5_000))
    assert rival.route(reasoning("fits not", 4_801, turns=1), 0.0) is None
    assert rival.route(reasoning("would fit", 10, turns=1), 0.0) is None
    alone = _one_engine(10_000, acting("there", 5_000))
    assert alone.route(reasoning("fits", 4_800, turns=1), 0.0) == "e"


def test_acting_programs_leave_the_shortest_first_until_the_rest_fits() -> None:

    def paused(too_many: int) -> list[str]:
        programs = [acting(f"p{tokens}", tokens) for tokens in (3_000, 1_000, 2_000, 4_000)]
        rival = _one_engine(10_000 + 4 * _BUFFER - too_many, *programs)
        list(rival.check(0.0))
        return [one.id for one in rival.paused()]

    assert paused(0) == []
    # Its buffer goes with it.
    assert paused(1) == paused(1_000 + _BUFFER) == ["p1000"]
    assert paused(1_001 + _BUFFER) == ["p1000", "p2000"]


def test_if_acting_ones_are_not_enough_all_reasoning_ones_are_marked() -> None:
    """What is marked is not deducted, so 4,420 tokens too many among twenty mark all twenty."""
    programs = [reasoning(f"p{number}", 5_000) for number in range(20)]
    rival = _one_engine(20 * (5_000 + _BUFFER) - 4_420, *programs)
    list(rival.check(0.0))
    assert rival.marked() == set(programs)
    assert not rival.paused()
    first = programs[0]
    first.reasoning = False
    rival.answered(first, 1.0)
    assert rival.paused() == [first]
    assert first not in rival.marked()
    assert rival.room("e") > 0
    # It is too late for the others: there is room, but they are marked.
    list(rival.check(5.0))
    assert rival.marked() == set(programs[1:])


def test_a_turn_of_a_paused_program_waits_until_it_is_resumed() -> None:
    one, other = acting("one", 4_000), acting("other", 7_000)
    rival = _one_engine(10_000, one, other)
    list(rival.check(0.0))
    assert rival.paused() == [one]
    one.reasoning = other.reasoning = True
    assert rival.route(one, 1.0) is None
    assert list(rival.check(5.0)) == [], "the other one has its place yet"
    rival.ended(other)
    assert list(rival.check(10.0)) == [(one, "e")]
    assert rival.route(one, 11.0) == "e"


@pytest.mark.parametrize(("decay", "resumed"), [(2.0, ["one"]), (1.0, [])])
def test_acting_programs_count_half_with_each_second_when_others_resume(
    decay: float, resumed: list[str]
) -> None:
    rival = ThunderAgent({"e": StubEngine(10_000)}, decay=decay)
    _place(rival, acting("acts", 8_000, since_s=0.0))
    one = reasoning("one", 4_000, turns=1)
    assert rival.route(one, 0.0) is None
    # After one second they count 4,000: with both buffers and 4,000 more it fits into 10,000.
    assert [program.id for program, _ in rival.check(1.0)] == resumed
    # Pausing counts them in full, so who has just been resumed takes the place of who acts.
    assert [program.id for program in rival.paused()] == (["acts"] if resumed else ["one"])


def test_who_waits_with_a_turn_resumes_before_new_ones_and_these_before_acting_ones() -> None:
    room = StubEngine(100_000)
    rival = ThunderAgent({"e": room})
    waits, acts, new = acting("waits", 3_000), acting("acts", 200), reasoning("new", 1_000, turns=1)
    for one in (waits, acts):
        _place(rival, one)
    room.capacity_tokens = 1
    list(rival.check(0.0))
    waits.reasoning = True
    assert rival.route(waits, 0.0) is None
    assert rival.route(new, 0.0) is None
    room.capacity_tokens = 3_000 + _BUFFER
    assert [program.id for program, _ in rival.check(5.0)] == ["waits"]
    room.capacity_tokens += 1_000 + 2 * _BUFFER
    assert [program.id for program, _ in rival.check(10.0)] == ["new"]
    assert rival.paused() == [acts]


def test_who_is_resumed_goes_where_most_room_is_the_longest_first() -> None:
    small, large = StubEngine(1), StubEngine(1)
    rival = ThunderAgent({"small": small, "large": large})
    programs = [reasoning(f"p{tokens}", tokens, turns=1) for tokens in (1_000, 4_000, 2_500)]
    for one in programs:
        assert rival.route(one, 0.0) is None
    small.capacity_tokens, large.capacity_tokens = 4_000, 6_000
    assert [(one.id, where) for one, where in rival.check(5.0)] == [
        ("p4000", "large"),
        ("p2500", "small"),
        ("p1000", "large"),
    ]


def test_who_has_waited_for_half_an_hour_goes_on_regardless() -> None:
    rival = _one_engine(10_000, reasoning("there", 9_000))
    late = reasoning("late", 5_000, turns=1)
    assert rival.route(late, 0.0) is None
    assert list(rival.check(1_799.0)) == []
    assert list(rival.check(1_800.0)) == [(late, "e")]
