"""How much of a step background calls have."""

import math

import pytest

from conserve_inside.policy import Background


def known() -> Background:
    """Return a policy that has seen steps of 5 ms, 1 ms more a decode and 0.1 ms more a token."""
    background = Background()
    for step in range(200):
        decodes, tokens = step % 20 + 1, 100 * (step % 3)
        background.learn(0.005 + 0.001 * decodes + 0.0001 * tokens, decodes, tokens)
    return background


def test_background_calls_are_held_for_a_bounded_time_in_a_row_and_half_of_the_time() -> None:
    background, held, changes = Background(longest_s=10.0), 0, []
    for tenth in range(1_000):
        before = background.holds
        background.look(True, True, tenth / 10)
        held += background.holds
        if background.holds != before:
            changes.append(tenth / 10)
    assert changes == pytest.approx([0, 10, 20, 30, 40, 50, 60, 70, 80, 90], abs=0.5)
    assert 480 < held < 520
    # A person who is there for a second in ten never uses that up.
    background = Background(longest_s=10.0)
    for tenth in range(1_000):
        background.look(tenth % 100 < 10, True, tenth / 10)
        assert background.holds == (tenth % 100 < 10)


def test_only_as_many_decode_beside_interactive_calls_as_hardly_lengthen_a_step() -> None:
    background = known()
    background.look(True, True, 0.0)
    # A step of one takes 6 ms, and may take 0.6 more. Of 26 it takes 31, and may take 3.1 more.
    assert background.share(1, 20, True) == (0, math.inf)
    assert background.share(26, 20, True) == (3, math.inf)
    assert background.share(26, 2, True) == (2, math.inf)
    # Prompts of interactive calls have the step for themselves.
    assert background.share(0, 20, True) == (0, math.inf)


def test_steps_are_short_for_a_while_after_an_interactive_call() -> None:
    background = known()
    background.look(False, True, 0.0)
    assert background.share(0, 40, True) == (40, math.inf)
    background.look(True, True, 1.0)
    background.look(False, True, 2.0)
    # 30 ms at most, 25 of them for decodes and prompts.
    assert background.share(0, 40, False)[0] in (24, 25)
    assert background.share(0, 40, True) == (12, pytest.approx(130, rel=0.1))
    assert background.share(0, 2, True) == (2, pytest.approx(230, rel=0.1))
    background.look(False, True, 32.0)
    assert background.share(0, 40, True) == (40, math.inf)


def test_before_it_knows_what_steps_take_it_holds_all_or_none() -> None:
    background = Background()
    background.look(True, True, 0.0)
    assert background.share(1, 20, True) == (0, math.inf)
    background.look(False, True, 0.0)
    assert background.share(0, 20, True) == (20, math.inf)
