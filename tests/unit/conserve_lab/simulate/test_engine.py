"""What rivals need of an engine: a line by priority, KV that is kept, and what preemption costs."""

import pytest

from conserve_lab.simulate.engine import EngineTurn
from tests.unit.conserve_lab.simulate.scenes import LoneEngine


class _Bench(LoneEngine):
    """An engine that keeps what has ended, to which turns are given by their lengths."""

    def __init__(self, capacity_tokens: int, keeps: bool = True) -> None:
        super().__init__(capacity_tokens, keeps=keeps)

    def submit(
        self, conversation: str, prompt: int, output: int, reusable: int = 0, priority: float = 0.0
    ) -> EngineTurn:
        work = EngineTurn(conversation, prompt, output, reusable, priority=priority)
        self.engine.submit(work, self.now_s)
        return work

    @property
    def ends(self) -> list[tuple[str, float]]:
        return [(work.conversation, at_s) for work, at_s in self.ended]


def test_turns_wait_by_priority_and_of_equal_ones_as_they_came() -> None:
    bench = _Bench(1_000)
    bench.submit("runs", 900, 5)
    for name, priority in (("b", 1.0), ("d", 2.0), ("a", 0.0), ("c", 1.0)):
        bench.submit(name, 900, 5, priority=priority)
    assert bench.engine.turns == 5
    bench.run()
    assert [name for name, _ in bench.ends] == ["runs", "a", "b", "c", "d"]
    assert bench.engine.turns == 0


@pytest.mark.parametrize(("priorities", "last"), [((0.0, 0.0), "second"), ((1.0, 0.0), "first")])
def test_who_goes_last_is_preempted(priorities: tuple[float, float], last: str) -> None:
    bench = _Bench(1_000)
    works = {
        name: bench.submit(name, 400, 300, priority=priority)
        for name, priority in zip(("first", "second"), priorities, strict=True)
    }
    bench.run()
    assert bench.engine.preemptions == 1
    assert bench.ends[-1][0] == last
    assert all(work.cached_tokens == 0 for work in works.values())


def test_what_a_preempted_turn_had_computed_is_computed_again_only_if_its_room_was_needed() -> None:
    """Of two that grow, the second is sent back when 1,000 tokens are full, and comes back later.

    What is computed again is what the first one has grown by meanwhile; where nothing is kept, it
    is all.
    """

    def prefill_s(keeps: bool) -> float:
        bench = _Bench(1_000, keeps)
        bench.submit("first", 400, 300)
        bench.submit("second", 400, 300)
        bench.run()
        assert bench.engine.preemptions == 1
        return bench.engine.busy_prefill_s

    roomy = _Bench(2_000)
    roomy.submit("first", 400, 300)
    roomy.submit("second", 400, 300)
    roomy.run()
    assert roomy.engine.preemptions == 0
    assert roomy.engine.busy_prefill_s < prefill_s(keeps=True) < prefill_s(keeps=False)


def _pinned(for_s: float) -> _Bench:
    bench = _Bench(1_000)
    bench.submit("old", 400, 10)
    bench.run()
    bench.engine.pin("old", bench.now_s + for_s)
    return bench


def test_kv_that_is_pinned_stays_while_others_wait_for_its_room() -> None:
    bench = _pinned(1e6)
    bench.submit("runs", 300, 200)
    bench.run(bench.now_s + 0.1)
    waits = bench.submit("waits", 500, 5)
    back = bench.submit("old", 420, 5, reusable=410)
    bench.run()
    # There was no room beside what is pinned until the other one had ended; and it stayed.
    assert [name for name, _ in bench.ends] == ["old", "runs", "waits", "old"]
    assert waits.first_token_s > bench.ends[1][1]
    assert back.cached_tokens == 400


def test_where_nothing_runs_nobody_waits_for_a_pin() -> None:
    bench = _pinned(1e9)
    bench.submit("large", 800, 5)
    bench.run()
    assert [name for name, _ in bench.ends] == ["old", "large"]


def test_kv_that_is_pinned_no_longer_is_dropped_for_who_waits() -> None:
    bench = _pinned(0.05)
    bench.submit("runs", 300, 200)
    bench.run(bench.now_s + 0.1)
    waits = bench.submit("waits", 500, 5)
    bench.run()
    assert waits.first_token_s < dict(bench.ends)["runs"]
    assert bench.engine.holds("old") < 400


def test_turns_that_run_take_pinned_kv_before_any_of_them_is_sent_back() -> None:
    bench = _pinned(1e9)
    bench.submit("grows", 400, 500)
    bench.run()
    assert bench.engine.preemptions == 0
    assert bench.engine.holds("old") < 100
    bench.engine.forget("old")
    assert bench.engine.idle_tokens == bench.engine.holds("grows") == 900
