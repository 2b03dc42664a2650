"""The SMs that decodes have to themselves beside prefills."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve_inside.policy import DecodeReserve

SIZES = (16, 32, 40, 56, 72, 80, 96, 112, 120, 132)
# The largest with no more than nine tenths of them.
MOST = 112


def base_sms(controller: DecodeReserve, now_s: float) -> int:
    """R_base: what decodes have once a prefill has waited for too long."""
    return controller.decide(decodes=True, waited_s=math.inf, now_s=now_s)


class Engine:
    """Steps of an engine with this much decode work, beside a prefill that has just come."""

    def __init__(self, controller: DecodeReserve, work_s: float) -> None:
        self.controller = controller
        self.work_s = work_s
        self.now_s = 0.0

    def run(self, steps: int, waited_s: float = 0.0) -> list[int]:
        """Return the SMs of decodes in each step, which lasts as long as their work takes on
        these.
        """
        had = []
        for _ in range(steps):
            sms = self.controller.decide(decodes=True, waited_s=waited_s, now_s=self.now_s)
            lasted_s = self.work_s / sms
            self.now_s += lasted_s
            self.controller.step(lasted_s, sms, self.now_s)
            had.append(sms)
        return had


def test_it_finds_the_smallest_size_that_is_fast_enough_and_stays() -> None:
    engine = Engine(DecodeReserve(SIZES), work_s=2.5)  # 50 SMs would just do.
    had = engine.run(400)
    assert had[0] == 16
    assert set(had[100:]) == {56}
    assert base_sms(engine.controller, engine.now_s) == 56
    assert engine.controller.tpot_s == pytest.approx(2.5 / 56)


def test_less_work_gives_sms_back_and_more_takes_them_again() -> None:
    engine = Engine(DecodeReserve(SIZES), work_s=5.0)
    engine.run(400)
    assert engine.run(1) == [112]
    engine.work_s = 0.5
    assert engine.run(20_000)[-1] == 16
    engine.work_s = 2.5
    assert engine.run(200)[-1] == 56


def test_a_size_that_was_too_slow_is_not_tried_again_for_a_while() -> None:
    """The next larger one is so fast that the paper's rule would go back at once."""
    engine = Engine(DecodeReserve((10, 100, 200)), work_s=1.0)
    engine.run(8)
    had = engine.run(1_000)  # 10 ms each: 10 s.
    assert set(had) == {100}
    # What was seen is forgotten, and tried.
    assert 10 in engine.run(6_000)


def test_prefills_always_keep_a_tenth_and_more_once_they_have_waited() -> None:
    engine = Engine(DecodeReserve(SIZES), work_s=2.9)
    engine.run(100)
    controller = engine.controller
    # Too slow at 56, and calm enough at none.
    assert engine.run(1) == [72]
    engine.work_s = 1e3
    assert max(engine.run(1_000)) == MOST
    # Everything was too slow: there is nothing between what it needs and what it may have.
    assert controller.decide(decodes=True, waited_s=6.0, now_s=engine.now_s) == MOST
    # Long after, all is to be tried again, and who has waited for long does not wait for that.
    later_s = engine.now_s + 1_000
    assert controller.decide(decodes=True, waited_s=1.0, now_s=later_s) == MOST
    assert controller.decide(decodes=True, waited_s=6.0, now_s=later_s) == 16


@given(
    st.lists(
        st.tuples(st.booleans(), st.none() | st.floats(0, 20), st.floats(1e-4, 1)), max_size=200
    )
)
def test_whatever_happens_it_gives_what_there_is(
    events: list[tuple[bool, float | None, float]],
) -> None:
    controller = DecodeReserve(SIZES)
    now_s = 0.0
    for decodes, waited_s, lasted_s in events:
        sms = controller.decide(decodes=decodes, waited_s=waited_s, now_s=now_s)
        now_s += lasted_s
        if waited_s is None:
            assert sms == 132
        elif not decodes:
            assert sms == 0
        else:
            assert sms in SIZES
            assert base_sms(controller, now_s - lasted_s) <= sms <= MOST
            controller.step(lasted_s, sms, now_s)
