"""Placement policies: where conversations go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.placement import (
    CollocatedPlacement,
    ConversationPlacement,
    Decoder,
    FullDisaggregationPlacement,
    PerTurnPlacement,
    Placement,
    PlacementPolicy,
    Prefiller,
    Shared,
)

P9, Q3, R3 = Prefiller("p", 9), Prefiller("q", 3), Prefiller("r", 3)


@pytest.mark.parametrize(
    ("prompt_tokens", "decoders", "chosen"),
    [
        (10, [Decoder("a", 100, 60, 1), Decoder("b", 100, 50, 1)], "b"),
        # Emptiness is a share of the decoder's own capacity: b holds more tokens, but a is fuller.
        (10, [Decoder("a", 100, 50, 1), Decoder("b", 1000, 400, 1)], "b"),
        # Equal ones go to fewer conversations, and full ties to the first.
        (10, [Decoder("a", 100, 50, 3), Decoder("b", 100, 50, 2)], "b"),
        (10, [Decoder("b", 100, 50, 2), Decoder("a", 100, 50, 2)], "b"),
        # A fuller one with room is better than an emptier one without.
        (60, [Decoder("small", 100, 50, 1), Decoder("large", 1000, 900, 1)], "large"),
        (10, [Decoder("a", 100, 95, 1), Decoder("b", 1000, 991, 1)], None),
        (50, [Decoder("a", 100, 50, 1)], "a"),
        (51, [Decoder("a", 100, 50, 1)], None),
        # An empty one takes what can never fit; else it would wait for ever.
        (500, [Decoder("a", 100, 10, 1), Decoder("b", 100)], "b"),
        (10, [], None),
    ],
)
def test_the_emptiest_decoder_with_room_and_the_emptiest_prefiller_are_chosen(
    prompt_tokens: int, decoders: list[Decoder], chosen: str | None
) -> None:
    """All baselines choose the same decoder, so that they differ only in where prefills run."""
    for policy, prefiller in (
        (ConversationPlacement(), "q"),
        (CollocatedPlacement(), None),
        (FullDisaggregationPlacement(), "q"),
        (PerTurnPlacement(0.1), "q"),
    ):
        expected = None if chosen is None else Placement(chosen, prefiller)
        assert policy.place(prompt_tokens, iter(decoders), iter([P9, Q3, R3])) == expected


@pytest.mark.parametrize(
    ("warm_tokens", "parked_tokens", "expected"),
    [
        (0, 500, Placement("empty", None)),
        (700, 500, Placement("warm", None)),
        (700, 900, Placement("empty", None)),
        # Most of it is nowhere.
        (0, 400, Placement("empty", "p")),
    ],
)
def test_what_is_in_host_memory_is_taken_where_no_decoder_has_more(
    warm_tokens: int, parked_tokens: int, expected: Placement
) -> None:
    decoders = [Decoder("warm", 2000, 800, 1), Decoder("empty", 2000)]
    held = {"warm": warm_tokens} if warm_tokens else {}
    shared = Shared(held, "warm" if warm_tokens else None, parked_tokens=parked_tokens)
    assert ConversationPlacement().place(1000, decoders, [Prefiller("p")], shared) == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "prefillers", "chosen"), [(9, ["p"], None), (10, ["p"], "p"), (10, [], None)]
)
def test_short_first_turns_and_those_without_prefillers_stay_on_the_decoder(
    prompt_tokens: int, prefillers: list[str], chosen: str | None
) -> None:
    policy = ConversationPlacement(min_remote_prefill_tokens=10)
    placement = policy.place(prompt_tokens, [Decoder("d", 100)], map(Prefiller, prefillers))
    assert placement == Placement("d", chosen)


@pytest.mark.parametrize(
    ("policy", "first", "later"),
    [
        (ConversationPlacement(), "p", None),
        (CollocatedPlacement(), None, None),
        (FullDisaggregationPlacement(), "p", "p"),
        (PerTurnPlacement(0.0), "p", None),
        (PerTurnPlacement(1.0), "p", "p"),
    ],
)
def test_where_each_policy_has_prefills_run(
    policy: PlacementPolicy, first: str | None, later: str | None
) -> None:
    assert policy.place(10, [Decoder("d", 100)], [Prefiller("p")]) == Placement("d", first)
    for _ in range(20):
        assert policy.prefill_later_turn([Prefiller("q", 7), Prefiller("p", 3)]) == later
    assert policy.prefill_later_turn([]) is None


@given(st.floats(0, 1), st.integers(0, 2**32))
def test_wrong_decisions_come_at_their_rate(rate: float, seed: int) -> None:
    policy, again = PerTurnPlacement(rate, seed), PerTurnPlacement(rate, seed)
    decisions = [policy.prefill_later_turn([Prefiller("p")]) for _ in range(2000)]
    assert decisions == [again.prefill_later_turn([Prefiller("p")]) for _ in range(2000)]
    # Five standard deviations.
    assert abs(decisions.count("p") / 2000 - rate) < 0.06
