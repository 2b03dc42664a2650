"""The use of decoders' KV space: five terms that add up to all of it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.costs import TERMS, SpaceTimeCosts
from conserve.turn import TurnStats

CAPACITY = 1000


def a_decoder(held_tokens: int = 0) -> SpaceTimeCosts:
    costs = SpaceTimeCosts()
    costs.add("d", CAPACITY, 0.0)
    costs.look("d", held_tokens, 0.0)
    return costs


def with_a_turn(held_tokens: int = 200, tokens: int = 200, had_tokens: int = 0) -> SpaceTimeCosts:
    costs = a_decoder(held_tokens)
    costs.begin("t", "d", tokens, had_tokens, now_s=0.0)
    return costs


def stats(
    prompt: int, found: int = 0, decode_s: float | None = 4.0, prefilled: int = 0
) -> TurnStats:
    return TurnStats(prompt, 20, found, decode_s=decode_s, prefilled_tokens=prefilled)


def of(costs: SpaceTimeCosts, now_s: float) -> dict[str, float]:
    costs.look("d", 0, now_s)
    return {term: round(cost, 6) for term, cost in costs.terms("d").items() if cost}


def test_what_is_held_for_nobody_who_runs_is_cached() -> None:
    assert of(a_decoder(300), 10.0) == {"unused": 7000, "caching": 3000}


def test_a_turns_room_is_decode_from_the_first_token_on_and_prefill_before() -> None:
    costs = with_a_turn(300, had_tokens=180)
    costs.end("t", stats(240, found=180), 10.0)
    assert of(costs, 10.0) == {"decode": 800, "prefill": 1200, "unused": 7000, "caching": 1000}
    assert costs.recomputed_tokens == 0


def test_what_was_computed_beyond_what_came_new_is_recomputed() -> None:
    """Of 240 tokens 60 are new, and 120 were computed: half of these again."""
    costs = with_a_turn(had_tokens=180)
    costs.end("t", stats(240, found=120), 10.0)
    assert of(costs, 10.0) == {"decode": 800, "prefill": 600, "recompute": 600, "unused": 8000}
    assert costs.recomputed_tokens == 60


def test_what_a_prefiller_computes_again_counts_with_its_turn() -> None:
    costs = with_a_turn(had_tokens=180)
    costs.end("t", stats(200, found=200, prefilled=200), 10.0)
    assert of(costs, 10.0)["recompute"] == pytest.approx(1200 * 180 / 200)
    assert costs.recomputed_tokens == 180


def test_of_a_first_turn_nothing_is_computed_again() -> None:
    costs = with_a_turn()
    costs.end("t", stats(200, prefilled=200), 10.0)
    assert of(costs, 10.0) == {"decode": 800, "prefill": 1200, "unused": 8000}


@pytest.mark.parametrize(
    ("told", "term"), [(None, "prefill"), (stats(200, decode_s=None), "decode")]
)
def test_a_turn_of_which_less_is_known(told: TurnStats | None, term: str) -> None:
    costs = with_a_turn()
    costs.end("t", told, 10.0)
    assert of(costs, 10.0) == {term: 2000, "unused": 8000}


def test_what_turns_begin_with_alike_is_divided_among_them() -> None:
    """Two of 300 tokens each, 200 of which they share."""
    costs = a_decoder(400)
    for name in ("a", "b"):
        costs.begin(name, "d", 300, had_tokens=0, now_s=0.0)
    costs.end("a", None, 10.0)
    costs.look("d", 300, 10.0)
    costs.end("b", None, 20.0)
    assert of(costs, 20.0) == {"prefill": 4000 + 3000, "unused": 6000 + 7000}


STEPS = st.lists(
    st.tuples(
        st.floats(-1, 50),  # Clocks may go back a little.
        st.sampled_from(["look", "begin", "end", "remove", "add"]),
        st.sampled_from(["d", "e"]),
        st.integers(0, 5),
        st.integers(0, 3 * CAPACITY),
        st.integers(0, 2 * CAPACITY),
        st.none() | st.floats(0, 100),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_terms_add_up_to_the_capacity_times_the_time(steps: list[Any]) -> None:
    """In any order of events; and none of the terms ever falls."""
    costs = SpaceTimeCosts()
    now_s, newest_s = 0.0, 0.0
    added_s: dict[str, float] = {}
    before: dict[str, dict[Any, float]] = {}
    for passed_s, act, decoder, turn, tokens, had_tokens, decode_s in steps:
        now_s = max(0.0, now_s + passed_s)
        newest_s = max(newest_s, now_s)
        if act == "look":
            costs.look(decoder, tokens, now_s)
        elif act == "begin":
            costs.begin(turn, decoder, tokens, had_tokens, now_s)
        elif act == "end":
            told = None if tokens % 3 == 0 else TurnStats(tokens, 1, 0, 0, decode_s=decode_s)
            costs.end(turn, told, now_s)
        elif act == "remove":
            costs.remove(decoder)
            added_s.pop(decoder, None)
            before.pop(decoder, None)
        elif decoder not in added_s:
            costs.add(decoder, CAPACITY, newest_s)
            added_s[decoder] = newest_s
        for known, since_s in added_s.items():
            costs.look(known, costs._decoders[known].held_tokens, newest_s)
            terms = costs.terms(known)
            whole = math.fsum(terms.values()) + costs.running(known)
            assert whole == pytest.approx(CAPACITY * (newest_s - since_s), rel=1e-9, abs=1e-6)
            assert all(terms[term] >= before.get(known, terms)[term] - 1e-9 for term in TERMS)
            before[known] = terms
    # Without turns that run, by themselves.
    for turn in range(6):
        costs.end(turn, None, newest_s)
    for known, since_s in added_s.items():
        whole = math.fsum(costs.terms(known).values())
        assert whole == pytest.approx(CAPACITY * (newest_s - since_s), rel=1e-9, abs=1e-6)
        assert costs._decoders[known].running_tokens == 0
    assert costs._turns == {}
