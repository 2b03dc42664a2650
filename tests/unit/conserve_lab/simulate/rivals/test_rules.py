"""The rules of those that need no more than a line or two."""

from conserve_lab.simulate.rivals import Program, make_rival
from tests.unit.conserve_lab.simulate.rivals.stub import StubEngine


def test_a_program_leaves_an_engine_with_far_more_turns_than_another() -> None:
    engines = {"a": StubEngine(turns=2), "b": StubEngine(turns=1)}
    rival = make_rival("sticky", engines)
    assert rival.route(Program("new"), 0.0) == "b"
    assert rival.route(Program("old", engine_id="a"), 0.0) == "a"
    engines["a"].turns = 3
    assert rival.route(Program("old", engine_id="a"), 0.0) == "b"
    # Two more of many are no reason.
    engines["a"].turns, engines["b"].turns = 12, 10
    assert rival.route(Program("old", engine_id="a"), 0.0) == "a"


def test_with_a_time_to_live_who_came_first_goes_first() -> None:
    rival = make_rival("ttl", {"a": StubEngine()}, ttl_s=7.0)
    assert rival.keep_s(Program("p")) == 7.0
    assert rival.priority(Program("first", 1.0)) < rival.priority(Program("second", 2.0))


def test_who_has_had_less_service_goes_first_in_levels() -> None:
    rival = make_rival("attained", {"a": StubEngine()})

    def queue(attained_s: float) -> float:
        return rival.priority(Program("p", attained_s=attained_s))

    assert [queue(had_s) for had_s in (0.0, 0.9, 1.0, 3.9, 4.0, 16.0)] == [0, 0, 1, 1, 2, 3]
    assert queue(1e9) == queue(1e12) == 7
