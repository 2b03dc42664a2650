"""The lane, and how many SMs each side has."""

import random

import pytest

from benchmarks.simulate.inside.conversations import Parts
from benchmarks.simulate.inside.costs import A5000, H100_NVL, QWEN3_CODER_30B, QWEN25_7B, Steps
from benchmarks.simulate.inside.sm_share import FedBackShare, FixedShare, bandwidth_of
from tests.unit.benchmarks.simulate.inside.playing import (
    Played,
    count_blocks,
    random_turns,
    scheduler_of,
)


@pytest.mark.parametrize("parts", [None, Parts()])
@pytest.mark.parametrize("seed", range(3))
def test_every_turn_ends_with_its_tokens(parts: Parts | None, seed: int) -> None:
    turns = random_turns(seed)
    played = Played(scheduler_of(parts, blocks=5_000), turns, FedBackShare(late_s=0.05))
    chance = random.Random(seed)
    for key in turns:
        played.begin(key, chance.uniform(0, 3))
    played.run()
    assert len(played.ends_s) == sum(map(len, turns.values()))
    for key, these in turns.items():
        for number, (_, output, _) in enumerate(these):
            assert played.call(key, number).made_tokens == output
    assert played.engine.laned > len(turns) / 3
    for key in list(played.scheduler.blocks.kept):
        played.scheduler.blocks.unkeep(key)
    assert played.scheduler.blocks.free == 5_000
    count_blocks(played.scheduler.blocks)


def test_a_cold_prompt_beside_a_decode_by_hand() -> None:
    turns = {"chat": [(10, 100, 0)], "cold": [(300, 1, 0)]}
    played = Played(scheduler_of(Parts(), blocks=1_000), turns, FixedShare(0.5))
    played.begin("chat")
    played.begin("cold", 0.5)
    played.run()
    chat, cold = played.call("chat"), played.call("cold")
    # Its prompt had the GPU alone.
    assert chat.first_token_s == pytest.approx(0.020)
    # Half of the SMs: twice the time, for both, while both have work; then all of them again.
    assert cold.first_token_s == pytest.approx(0.5 + 2 * 0.310, abs=0.001)
    assert max(chat.gaps_s) == pytest.approx(0.020)
    assert sum(gap > 0.015 for gap in chat.gaps_s) == pytest.approx(31, abs=1)


def test_what_is_short_and_what_is_alone_does_not_go_through_the_lane() -> None:
    turns = {"chat": [(300, 200, 0)], "agent": [(300, 5, 0.1), (20, 5, 0)]}
    played = Played(scheduler_of(Parts(), blocks=1_000), turns, FixedShare(0.5))
    played.begin("chat")
    played.begin("agent", 0.5)
    played.run()
    assert played.engine.laned == 1
    static = Played(scheduler_of(None, blocks=1_000), turns, FixedShare(0.5))
    static.begin("chat")
    static.begin("agent", 0.5)
    static.run()
    assert static.engine.laned == 3


def test_who_has_waited_long_enough_for_the_lane_is_prefilled_in_steps() -> None:
    turns = {"chat": [(10, 1_500, 0)], "long": [(3_000, 5, 0)], "longer": [(3_000, 5, 0)]}
    played = Played(scheduler_of(Parts(), blocks=1_000), turns, FixedShare(0.5))
    played.begin("chat")
    played.begin("long", 0.5)
    played.begin("longer", 0.6)
    played.run()
    assert played.engine.laned == 1
    # Beside the lane's, from two seconds on; after it, it would have come six seconds later.
    assert played.call("longer").first_token_s < played.call("long").first_token_s + 5


def test_late_decodes_get_more_sms_but_never_all() -> None:
    share, now_s = FedBackShare(late_s=0.05), 0.0
    seen = [share.decide(0.1, 0.0)]
    for lasted_s in [0.08] * 100 + [0.01] * 7_000:
        now_s += lasted_s
        share.step(lasted_s, seen[-1], now_s)
        seen.append(share.decide(0.1, now_s))
    assert seen[:17:8] == [0.1, 0.2, 0.3]
    assert max(seen) == 0.9
    # Calm ones give them back, once it is forgotten that fewer were too few.
    assert seen[-1] == 0.1


def test_steps_cost_what_data_sheets_say() -> None:
    steps = Steps(A5000, QWEN25_7B)
    # A lone decode reads the weights: 15.2 GB at 576 GB/s.
    assert steps.step_s(1) == pytest.approx(15.2e9 / 576e9, rel=0.01)
    # 3,000 tokens: 39 TFLOP at 50 TFLOP/s, and attention.
    assert steps.step_s(0, 0, [(3_000, 0)]) == pytest.approx(0.79 + 0.03, rel=0.05)
    # Decodes hide behind it.
    assert steps.step_s(4, 0, [(2_048, 0)]) < 1.01 * steps.step_s(0, 0, [(2_048, 0)])
    # What few tokens use of many experts is less than all of them.
    moe = Steps(H100_NVL, QWEN3_CODER_30B)
    assert moe.step_s(1) < moe.step_s(8) < moe.step_s(64) < 61e9 / (0.75 * 3.9e12) + 0.002
    assert moe.step_s(1) < 0.15 * moe.step_s(64)
    assert 150_000 < moe.capacity_tokens < 250_000


def test_bandwidth_saturates_before_all_sms_have_work() -> None:
    assert [bandwidth_of(share) for share in (0.1, 0.4, 1.0)] == [pytest.approx(0.25), 1.0, 1.0]
