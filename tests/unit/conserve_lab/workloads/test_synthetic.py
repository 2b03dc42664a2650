"""Drawn conversations have the presets' numbers, and prompts of exactly the drawn lengths."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from conserve_lab.records import Script, TurnRequest
from conserve_lab.workloads import (
    PRESETS,
    Arrivals,
    Latency,
    Shape,
    Spread,
    Workload,
    WorkloadError,
    synthetic,
)

VOCABULARY = range(300, 4_000)
SMALL = Shape(
    turns=Spread(2, 3, 5),
    first_prompt_tokens=Spread(40, 60, 90),
    append_tokens=Spread(3, 8, 20),
    output_tokens=Spread(1, 5, 9),
    tool_latency=Latency(1.0, 4.0),
)


def make(shape: Shape, conversations: int = 20, **settings: Any) -> Workload:
    return synthetic(
        shape,
        conversations=conversations,
        arrivals=Arrivals("together"),
        vocabulary=VOCABULARY,
        **settings,
    )


def drawn(workload: Workload) -> list[list[TurnRequest]]:
    def turns(script: Script) -> list[TurnRequest]:
        return list(iter(lambda: script.next(None), None))

    return [turns(script) for _, script in workload]


def appended(turns: list[TurnRequest]) -> list[int]:
    """What each later turn adds after the prompt and the output before it."""
    return [
        (now.prompt_tokens or 0) - (before.prompt_tokens or 0) - (before.output_tokens or 0)
        for before, now in pairwise(turns)
    ]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_numbers_are_those_of_the_preset(name: str) -> None:
    shape, conversations = PRESETS[name], drawn(make(PRESETS[name], 800))
    turns = [turn for made in conversations for turn in made]
    for spread, values in (
        (shape.turns, [len(made) for made in conversations]),
        (shape.first_prompt_tokens, [made[0].prompt_tokens or 0 for made in conversations]),
        (shape.append_tokens, [value for made in conversations for value in appended(made)]),
        (shape.output_tokens, [turn.output_tokens or 0 for turn in turns]),
    ):
        assert spread.low <= min(values)
        assert max(values) <= spread.high
        assert np.mean(values) == pytest.approx(spread.mean, rel=0.05)
        assert len(set(values)) > 1
    gaps_s = [turn.gap_s for made in conversations for turn in made[1:]]
    expected_s = (shape.tool_latency.p50_s, shape.tool_latency.p95_s)
    assert np.percentile(gaps_s, (50, 95)) == pytest.approx(expected_s, rel=0.15)
    assert all(made[0].gap_s == 0 for made in conversations)


def test_each_prompt_goes_on_from_the_one_before() -> None:
    for made in drawn(make(SMALL)):
        bodies = [turn.body() for turn in made]
        for turn, body in zip(made, bodies, strict=True):
            assert len(body["prompt"]) == turn.prompt_tokens
            assert set(body["prompt"]) <= set(VOCABULARY)
            assert body | {"prompt": []} == {
                "prompt": [],
                "max_tokens": turn.output_tokens,
                "min_tokens": turn.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        for before, now, turn in zip(bodies, bodies[1:], made[1:], strict=False):
            assert turn.reused_tokens == len(before["prompt"])
            assert now["prompt"][: turn.reused_tokens] == before["prompt"]
        assert [turn.effective for turn in made] == [False] * (len(made) - 1) + [True]


@pytest.mark.parametrize("shared", [0, 17, 1_000])
def test_conversations_share_their_first_tokens(shared: int) -> None:
    made = drawn(make(replace(SMALL, shared_tokens=shared)))
    one, two = (turns[0].body()["prompt"] for turns in made[:2])
    length = min(shared, len(one), len(two))
    assert one[:length] == two[:length]
    assert one[length : length + 5] != two[length : length + 5] or shared == 1_000


def test_the_seed_decides_and_iterating_again_repeats() -> None:
    def everything(workload: Workload) -> list[Any]:
        return [[(turn.gap_s, turn.body()) for turn in made] for made in drawn(workload)]

    workload = make(SMALL, seed=2)
    assert everything(workload) == everything(workload) == everything(make(SMALL, seed=2))
    assert everything(make(SMALL, seed=3)) != everything(workload)
    names = [script.conversation for _, script in workload]
    assert len(set(names)) == len(names)


def test_scaling_keeps_the_proportions() -> None:
    whole, tenth = (drawn(make(PRESETS["conserve"], 50, scale_tokens=s)) for s in (1, 0.1))
    for one, other in zip(whole, tenth, strict=True):
        assert len(one) == len(other)
        assert other[0].prompt_tokens == pytest.approx((one[0].prompt_tokens or 0) / 10, abs=1)
        assert appended(other) == pytest.approx([value / 10 for value in appended(one)], abs=1)
        assert [turn.gap_s for turn in one] == [turn.gap_s for turn in other]
    slower = drawn(make(PRESETS["conserve"], 50, scale_gaps=2))
    assert slower[0][1].gap_s == pytest.approx(2 * whole[0][1].gap_s)


def test_what_does_not_fit_the_context_is_left_out_and_counted() -> None:
    whole, workload = drawn(make(SMALL, 100)), make(SMALL, 100, max_context_tokens=70)
    made = drawn(workload)
    fitting = [
        [t for t in turns if (t.prompt_tokens or 0) + (t.output_tokens or 0) <= 70]
        for turns in whole
    ]
    assert [len(turns) for turns in made] == [len(turns) for turns in fitting if turns]
    lost = sum(map(len, whole)) - sum(map(len, made))
    cut = sum(0 < len(a) < len(b) for a, b in zip(fitting, whole, strict=True))
    assert workload.counts == {
        "conversations": len(made),
        "turns": sum(map(len, made)),
        "conversations_cut": cut,
        "conversations_left_out": 100 - len(made),
        "turns_left_out": lost,
    }
    assert 0 < cut < 100
    with pytest.raises(WorkloadError, match="no conversation's first turn fits into 20 tokens"):
        make(SMALL, max_context_tokens=20)
