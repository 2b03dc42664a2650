"""Points: which beginnings of a history stay known, and how much of any."""

import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conserve.histories.prefixes import MOST_POINTS, Points, mark, newest_mark

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=200)


def digest(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(4, "big"), digest_size=16).digest()


def grown(steps: list[int]) -> tuple[Points, list[int]]:
    """A history whose turns each add this many tokens, and its lengths."""
    points, ends, tokens = Points(), [], 0
    for number, step in enumerate(steps):
        tokens += step
        ends.append(tokens)
        points.add(digest(number), tokens)
    return points, ends


@given(LENGTHS)
def test_the_first_and_the_newest_are_always_among_them(steps: list[int]) -> None:
    points, ends = grown(steps)
    kept = [tokens for _, tokens in points]
    assert len(points) == len(kept) == min(len(steps), MOST_POINTS)
    assert kept == sorted(kept)
    assert set(kept) <= set(ends)
    assert kept[0] == ends[0]
    assert kept[-4:] == ends[-4:]
    assert newest_mark(points.packed) == mark(digest(len(steps) - 1))


def test_of_any_beginning_more_than_half_is_known() -> None:
    """A first prompt of 3,000 tokens and 200 turns, left at any of them."""
    points, ends = grown([3000, *[700] * 200])
    kept = [tokens for _, tokens in points]
    for end in ends:
        known = max(tokens for tokens in kept if tokens <= end)
        assert known > 0.5 * end
    gaps = [longer / shorter for shorter, longer in pairwise(kept[:-4])]
    assert max(gaps) < 2


@given(LENGTHS, st.data())
def test_the_longest_of_a_turns_ends_is_found(steps: list[int], data: st.DataObject) -> None:
    points, _ = grown(steps)
    last = data.draw(st.integers(0, len(steps) - 1))
    ends = [digest(number) for number in range(last, -1, -1)]
    kept = {number: tokens for number in range(len(steps)) for m, tokens in points
            if m == mark(digest(number))}  # fmt: skip
    longest = max(number for number in kept if number <= last)
    assert points.longest(ends) == kept[longest]
    assert points.longest([digest(len(steps))]) == 0
    assert grown(steps[: longest + 1])[0].common(points) == kept[longest]


def test_an_answer_of_which_less_is_left_is_known_as_so_long() -> None:
    points, _ = grown([1000, 500, 500])
    points.clip(1700)
    assert [tokens for _, tokens in points] == [1000, 1500, 1700]
    points.clip(900)
    assert [tokens for _, tokens in points] == [1000, 1500, 1500]
    points.add(digest(9), 1800)
    assert [tokens for _, tokens in points] == [1000, 1500, 1500, 1800]
    Points().clip(5)


def test_a_shorter_one_takes_the_place_of_those_that_are_longer() -> None:
    points, _ = grown([1000, 500, 500])
    points.add(digest(9), 1200)
    assert [tokens for _, tokens in points] == [1000, 1200]
