"""Levels: the order of calls, and that none starves."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve_inside.policy import FeedbackQueue

CAPACITY = 64_000


def test_a_small_call_goes_before_a_large_one_and_a_new_one_before_a_much_served_one() -> None:
    queue = FeedbackQueue(CAPACITY)
    sizes = [queue.level("c", tokens, 0.0, 0.0) for tokens in (100, 2_000, 8_000, 32_000)]
    assert sizes == [0, 1, 2, 3]
    levels = []
    for _ in range(8):
        queue.serve("c", 2_048, 0, 0.0)
        levels.append(queue.level("c", 100, 0.0, 0.0))
    assert levels == [1, 1, 2, 2, 2, 2, 3, 3]
    # One of the background begins on the last level, and rises like any other.
    assert [queue.level("b", 100, waited_s, 0.0, last=True) for waited_s in (0, 3, 6)] == [3, 2, 0]


def test_service_counts_over_turns_and_is_forgotten_with_time() -> None:
    queue = FeedbackQueue(CAPACITY, window_s=60.0, decode_weight=4.0)
    queue.serve("c", 500, 25, 0.0)
    queue.serve("c", 500, 25, 0.0)
    assert queue.service_tokens("c", 0.0) == 1_200
    assert queue.service_tokens("c", 60.0) == pytest.approx(1_200 / math.e)
    assert queue.service_tokens("other", 0.0) == 0
    queue.forget("c")
    assert queue.service_tokens("c", 0.0) == 0


@dataclass
class Call:
    key: str
    tokens: int
    came_s: float


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 40_000), st.floats(0, 30)),
        min_size=2,
        max_size=40,
    ),
    st.floats(0.2, 4.0),
)
def test_nobody_goes_before_one_who_came_longer_ago_than_all_levels_take(
    given_calls: list[tuple[int, int, float]], age_s: float
) -> None:
    """One place, taken in order of level, then of arrival."""
    queue = FeedbackQueue(CAPACITY, age_s=age_s)
    due = sorted((Call(f"c{key}", tokens, came) for key, tokens, came in given_calls),
                 key=lambda call: call.came_s)  # fmt: skip
    waiting: list[Call] = []
    now_s, left = 0.0, len(due)
    while left:
        waiting += [call for call in due if call.came_s <= now_s]
        due = [call for call in due if call.came_s > now_s]
        if not waiting:
            now_s = due[0].came_s
            continue

        def rank(call: Call) -> tuple[int, float]:
            waited_s = now_s - call.came_s  # noqa: B023
            return queue.level(call.key, call.tokens, waited_s, now_s), call.came_s  # noqa: B023

        goes = min(waiting, key=rank)
        waiting.remove(goes)
        left -= 1
        for call in waiting:
            if now_s - call.came_s >= queue.levels * age_s:
                assert goes.came_s <= call.came_s
        queue.serve(goes.key, goes.tokens, 20, now_s)
        now_s += goes.tokens * 1e-4
