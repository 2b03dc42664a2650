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
    make_policy,
)


def choose(prompt_tokens: int, *decoders: Decoder) -> str | None:
    decision = ConversationPlacement().place(prompt_tokens, decoders, [])
    return decision.decoder_id if decision else None


def test_the_emptier_decoder_is_chosen() -> None:
    assert choose(10, Decoder("a", 100, 60, 1), Decoder("b", 100, 50, 1)) == "b"


def test_emptiness_is_a_share_of_the_decoders_own_capacity() -> None:
    # b holds more tokens, but a is fuller.
    assert choose(10, Decoder("a", 100, 50, 1), Decoder("b", 1000, 400, 1)) == "b"


def test_equal_occupancy_goes_to_fewer_conversations() -> None:
    assert choose(10, Decoder("a", 100, 50, 3), Decoder("b", 100, 50, 2)) == "b"


def test_full_ties_go_to_the_first() -> None:
    assert choose(10, Decoder("b", 100, 50, 2), Decoder("a", 100, 50, 2)) == "b"


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


def test_without_room_nothing_is_decided() -> None:
    full = [Decoder("a", 100, 95, 1), Decoder("b", 1000, 991, 1)]
    assert ConversationPlacement().place(10, full, [Prefiller("p")]) is None


def test_a_fuller_decoder_with_room_is_better_than_an_emptier_without() -> None:
    assert choose(60, Decoder("small", 100, 50, 1), Decoder("large", 1000, 900, 1)) == "large"


def test_the_last_token_fits() -> None:
    assert choose(50, Decoder("a", 100, 50, 1)) == "a"
    assert choose(51, Decoder("a", 100, 50, 1)) is None


def test_an_empty_decoder_takes_what_can_never_fit() -> None:
    """Else such a conversation would wait for ever."""
    assert choose(500, Decoder("a", 100, 10, 1), Decoder("b", 100)) == "b"


def test_no_decoders() -> None:
    assert ConversationPlacement().place(10, [], [Prefiller("p")]) is None


def test_the_prefiller_with_the_shortest_queue_is_chosen() -> None:
    decision = ConversationPlacement().place(
        10, [Decoder("d", 100)], [Prefiller("p", 9), Prefiller("q", 3), Prefiller("r", 3)]
    )
    assert decision == Placement("d", "q")


def test_without_prefillers_the_decoder_prefills() -> None:
    assert ConversationPlacement().place(10, [Decoder("d", 100)], []) == Placement("d", None)


def test_short_first_turns_can_be_kept_from_prefillers() -> None:
    policy = ConversationPlacement(min_remote_prefill_tokens=10)
    decoders, prefillers = [Decoder("d", 100)], [Prefiller("p")]
    assert policy.place(9, decoders, prefillers) == Placement("d", None)
    assert policy.place(10, decoders, prefillers) == Placement("d", "p")


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


def test_policies_by_name() -> None:
    assert make_policy("conversation", 7) == ConversationPlacement(7)
    assert make_policy("collocated") == CollocatedPlacement()
    assert type(make_policy("full_disaggregation")) is FullDisaggregationPlacement
    always = make_policy("per_turn", 1.0)
    assert always.prefill_later_turn([Prefiller("p")]) == "p"


DECODERS = st.lists(
    st.builds(
        Decoder,
        id=st.uuids().map(str),
        capacity_tokens=st.integers(1, 2000),
        held_tokens=st.integers(0, 2500),
        conversations=st.integers(0, 3),
    ),
    max_size=6,
)
PREFILLERS = st.lists(
    st.builds(Prefiller, id=st.uuids().map(str), queued_tokens=st.integers(0, 50)), max_size=4
)


@given(
    st.sampled_from(
        [
            CollocatedPlacement(),
            ConversationPlacement(),
            FullDisaggregationPlacement(),
            PerTurnPlacement(0.1),
        ]
    ),
    st.integers(0, 2500),
    DECODERS,
    PREFILLERS,
)
def test_the_choice_has_room_and_the_lowest_occupancy(
    policy: PlacementPolicy,
    prompt_tokens: int,
    decoders: list[Decoder],
    prefillers: list[Prefiller],
) -> None:
    """All baselines choose the same decoder, so that they differ only in where prefills run."""
    decision = policy.place(prompt_tokens, iter(decoders), iter(prefillers))
    fitting = {
        d.id: d.held_tokens / d.capacity_tokens
        for d in decoders
        if d.conversations == 0 or d.held_tokens + prompt_tokens <= d.capacity_tokens
    }
    if decision is None:
        assert not fitting
        return
    assert fitting[decision.decoder_id] == min(fitting.values())
    queues = {p.id: p.queued_tokens for p in prefillers}
    if decision.prefiller_id is None:
        assert not queues or isinstance(policy, CollocatedPlacement)
    else:
        assert queues[decision.prefiller_id] == min(queues.values())
