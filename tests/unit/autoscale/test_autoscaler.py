"""Both roles' numbers, from what a table observes."""

import pytest

from autoscale.autoscaler import Autoscaler, Limits
from conserve.placement import Decoder, Prefiller


def decoders(*held_tokens: int) -> list[Decoder]:
    return [
        Decoder(f"d{number}", 10_000, held, conversations=1)
        for number, held in enumerate(held_tokens)
    ]


def test_a_conversation_that_fits_nowhere_makes_one_more_wanted_and_no_further() -> None:
    autoscaler = Autoscaler({"decoder": Limits(1, 8)}, {"decoder": 2}, None, 30)
    # 4,500 tokens fit on neither, and there is room for 8,000 in all.
    for now_s in range(5):
        autoscaler.decide(decoders(6_000, 6_000), [], 4_500, now_s)
        assert autoscaler.replicas("decoder") == 3
    need = autoscaler.wanted["decoder"].need
    assert need is not None
    assert need.signal == "no room"
    autoscaler.decide(decoders(6_000, 6_000, 4_500), [], 0, 6)
    assert autoscaler.replicas("decoder") == 3


def test_what_a_predecessor_wanted_holds_for_the_cool_down() -> None:
    limits = Limits(1, 4, down_delay_s=5, cool_down_s=20)
    autoscaler = Autoscaler({"decoder": limits}, {"decoder": 1, "prefiller": 1}, None, 30)
    autoscaler.adopt("decoder", 3, 100)
    autoscaler.adopt("prefiller", 3, 100)  # Does not scale.
    autoscaler.adopt("decoder", 9, 100)  # Of other settings.
    seen = []
    for now_s in range(100, 130):
        autoscaler.decide(decoders(100, 100, 100), [], 0, now_s)
        seen.append(autoscaler.replicas("decoder"))
    assert seen == [3] * 20 + [1] * 10
    assert autoscaler.replicas("prefiller") == 1


def test_prefillers_that_host_have_their_part_of_the_need() -> None:
    """Two decoders and a prefiller, all as full: two more decoders would be one too many."""
    autoscaler = Autoscaler({"decoder": Limits(1, 8)}, {"decoder": 2, "prefiller": 1}, None, 30)
    hosts = decoders(9_000, 9_000, 9_000)
    autoscaler.decide(hosts, [Prefiller("d2")], 0, 1)
    need = autoscaler.wanted["decoder"].need
    assert need is not None
    assert need.replicas == pytest.approx(1.8)
    assert autoscaler.replicas("decoder") == 3
    # A prompt that fits nowhere makes one more wanted, as many as hosts there are.
    autoscaler = Autoscaler({"decoder": Limits(1, 8)}, {"decoder": 2, "prefiller": 1}, None, 30)
    autoscaler.decide(decoders(1_000, 1_000, 1_000), [Prefiller("d2")], 9_500, 1)
    assert autoscaler.replicas("decoder") == 3
    # Where prefillers alone are left, decoders are wanted for all of it.
    autoscaler.decide(decoders(9_000), [Prefiller("d0")], 0, 2)
    need = autoscaler.wanted["decoder"].need
    assert need is not None
    assert need.replicas == pytest.approx(0.9)
