"""Who runs next, who is preempted, and how long chunks are."""

import random
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.conserve_inside.scheduler.stand_in import StandIn
from tests.unit.deployments.engine.stepping import BLOCK_TOKENS, words


def latency_s(engine: StandIn, name: str) -> float:
    return engine.token_times_s[name][-1] - engine.added_s[name]


def mixed(kind: str, policies: dict[str, object] | None = None) -> tuple[float, float]:
    """Six light conversations beside three heavy ones, two at a time: the light ones' mean time a
    turn, and the heavy ones' longest."""
    engine = StandIn(
        kind=kind, blocks=600, policies=policies or {}, max_num_seqs=2, step_tokens=512,
        step_s=0.005, token_s=2e-4,
    )  # fmt: skip
    chance = random.Random(7)
    sizes = {f"heavy{n}": (900, 500, 400) for n in range(3)}
    sizes |= {f"light{n}": (90, 40, 40, 40) for n in range(6)}
    due = [(0.0 if n < 3 else 0.01 + 0.2 * (n - 3), key, 0) for n, key in enumerate(sizes)]
    history: dict[str, list[int]] = {}
    while due or engine.live:
        for one in [one for one in sorted(due) if one[0] <= engine.now_s]:
            due.remove(one)
            _, key, turn = one
            history[key] = history.get(key, []) + words(chance, sizes[key][turn])
            engine.add(f"{key}.{turn}", history[key], 20, key)
        for request in engine.step():
            key, turn = request.request_id.split(".")
            history[key] = history[key] + list(request.output_token_ids)
            if int(turn) + 1 < len(sizes[key]):
                due.append((engine.now_s + 0.4, key, int(turn) + 1))
    light = [latency_s(engine, name) for name in engine.token_times_s if "light" in name]
    heavy = [latency_s(engine, name) for name in engine.token_times_s if "heavy" in name]
    return sum(light) / len(light), max(heavy)


def test_light_conversations_wait_less_for_heavy_ones_which_wait_little_longer() -> None:
    feedback = {"quota_tokens": 512, "window_s": 600.0}
    theirs = mixed("vllm")
    ours = mixed("sync", {"feedback": {**feedback, "age_s": 0.4}})
    unordered = mixed("sync", {"feedback": feedback, "mechanisms": ("chunks", "retention")})
    assert ours[0] < 0.9 * unordered[0]
    assert ours[0] < 0.87 * theirs[0]
    assert ours[1] < 1.3 * theirs[1]
    # Without ageing the heavy ones pay.
    never = mixed("sync", {"feedback": {**feedback, "age_s": 1e9}})
    assert never[1] > ours[1]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_client_gives_as_priority_changes_nothing(kind: str) -> None:
    engine = StandIn(kind=kind, max_num_seqs=1)
    for number in range(4):
        engine.add(f"r{number}", range(number, number + 40), priority=-number)
        engine.now_s += 0.001
    engine.drain()
    firsts = [engine.token_times_s[f"r{number}"][0] for number in range(4)]
    assert firsts == sorted(firsts)


def preempted(kind: str, served: str | None) -> set[str]:
    """Who is preempted of three that grow into each other's room: 20 blocks are too few for all."""
    policies = {"feedback": {"footprints": ()}, "retention": {"hold_s": 0.0}}
    engine = StandIn(kind=kind, blocks=21, max_num_seqs=3, policies=policies)
    if served is not None:
        engine.scheduler.queue.serve(served, 60_000, 0, 0.0)
    engine.add("small", range(100), 100, "small")
    engine.add("middle", range(1, 151), 100, "middle")
    engine.add("large", range(2, 202), 100, "large")
    engine.drain()
    assert not engine.wrong
    assert sum(engine.scheduler.counts.preempted) == len(engine.preempted)
    engine.require_no_leak()
    return set(engine.preempted)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_lowest_level_is_preempted_and_of_equals_the_largest(kind: str) -> None:
    assert preempted(kind, served="small") == {"small"}
    assert preempted(kind, served="middle") == {"middle"}
    assert preempted(kind, served=None) == {"large"}


def longest_gap_s(kind: str, **more: Any) -> float:
    engine = StandIn(
        kind=kind, blocks=300, step_tokens=2_048, token_s=1e-4,
        policies={} if kind == "vllm" else {"chunks": {"late_s": 0.05}, **more},
    )  # fmt: skip
    for number in range(4):
        engine.add(f"decode{number}", range(number, number + 64), 120, f"decode{number}")
    for _ in range(20):
        engine.step()
    engine.add("long", range(1_800), 4, "long")
    engine.drain()
    assert not engine.wrong
    times = engine.token_times_s["decode0"]
    return max(after - before for before, after in pairwise(times[15:]))


def test_a_long_prompt_beside_decodes_is_cut_so_that_none_is_late() -> None:
    assert longest_gap_s("vllm") > 0.15
    assert longest_gap_s("sync") < 0.05
    assert longest_gap_s("async") < 0.05
    assert longest_gap_s("sync", mechanisms=("chunks",)) < 0.05
    assert longest_gap_s("sync", mechanisms=("order", "retention")) > 0.15


def test_a_prompt_alone_is_not_cut() -> None:
    engine = StandIn(blocks=300, step_tokens=2_048)
    engine.add("long", range(1_800), 1, "long")
    engine.drain()
    assert engine.steps == 1
    assert sum(engine.scheduler.counts.cut.values()) == 0


def test_a_prompt_without_room_begins_with_a_part_and_no_second_one_does() -> None:
    engine = StandIn(blocks=41, max_num_seqs=4, policies={"retention": {"hold_s": 0.0}})
    engine.add("decode", range(10 * BLOCK_TOKENS), 60, "decode")
    engine.step()
    # 29 blocks are free, and each of these wants 32.
    for number in range(2):
        tokens = range(1 + number, 1 + number + 32 * BLOCK_TOKENS)
        engine.add(f"long{number}", tokens, 4, f"long{number}")
    engine.step()
    assert [one.request_id for one in engine.scheduler.running] == ["decode", "long0"]
    while "decode" in engine.live:
        assert len(engine.scheduler.running) <= 2
        engine.step()
    engine.drain()
    assert not engine.preempted
    # One after the other.
    assert engine.scheduler.counts.parts == 2
    assert not engine.wrong
    engine.require_no_leak()


def test_who_was_preempted_begins_with_no_part_again() -> None:
    """Else two such prompts would go on taking each other's room."""
    engine = StandIn(blocks=41, max_num_seqs=4, policies={"retention": {"hold_s": 0.0}})
    engine.add("decode", range(10 * BLOCK_TOKENS), 60, "decode")
    engine.step()
    engine.add("long", range(1, 1 + 32 * BLOCK_TOKENS), 4, "long").num_preemptions = 1
    engine.step()
    assert [one.request_id for one in engine.scheduler.running] == ["decode"]
    engine.drain()
    assert not engine.wrong
    engine.require_no_leak()
