"""What is counted of whole sessions, and the search for the most agents."""

from dataclasses import replace
from typing import Any

import pytest

from conserve_lab.records import TurnRecord
from experiments import corpus
from experiments.corpus import Found, Run, found_in, most_agents

RUN = Run("data", "h100-qwen3-8b", "conserve", 1, 0, 0, 0)


def a_turn(conversation: str, turn: int, sent_s: float, **more: Any) -> TurnRecord:
    fields: dict[str, Any] = {
        "first_token_s": sent_s + 1.0,
        "last_token_s": sent_s + 3.0,
        "output_tokens": 11,
        "prompt_tokens": 100,
        "reused_tokens": 0 if turn == 1 else 80,
        "cached_tokens": 60,
        **more,
    }
    return TurnRecord("x", conversation, turn, sent_s, sent_s, sent_s + 4.0, "completed", **fields)


def test_only_what_ends_in_the_time_that_counts_is_counted() -> None:
    records = [
        a_turn("early", 1, 0.0),
        a_turn("early", 2, 20.0, last=True),
        a_turn("inside", 1, 12.0),
        a_turn("inside", 2, 30.0, effective=True, last=True),
        a_turn("late", 1, 97.0),
        replace(a_turn("refused", 1, 50.0), outcome="failed", first_token_s=None),
    ]
    found = found_in(records, 10.0, 100.0)
    assert (found.turns, found.first_turns, found.refused) == (3, 1, 1)
    assert found.output_tokens_per_s == 33 / 90
    assert found.found == 0.75
    assert found.ttft_s == found.first_s == (1.0, 1.0)
    # Of the one conversation that began and ended in it; its pause of 14 s is left out.
    assert found.ttfet_s == (5.0, 5.0)
    assert found.served_s == (8.0, 8.0)
    assert found.token_s == pytest.approx(0.2)


def test_a_live_answers_tokens_are_timed_one_by_one() -> None:
    turn = a_turn("a", 1, 0.0, last_token_s=None, token_times_s=(1.0, 1.5, 2.0), output_tokens=3)
    assert found_in([turn], -1.0, 10.0).token_s == 0.5


@pytest.mark.parametrize("most", [1, 3, 37, 300])
def test_bisection_finds_the_most_agents_that_keep_each_objective(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate(run: Run) -> tuple[Found, float]:
        two = (0.0, 1.0 if run.agents <= most else 3.0)
        token_s = 0.01 if run.agents <= 2 * most else 0.05
        return Found(1, 1, 0, 1.0, 1.0, two, two, two, two, token_s), 10.0 * run.agents

    monkeypatch.setattr(corpus, "simulate", simulate)
    (first, power_w), (second, _) = most_agents(RUN)
    # To a twentieth.
    assert 0.95 * most - 1 <= first <= most
    assert 0.95 * min(2 * most, 511) - 1 <= second <= 2 * most
    assert power_w == 10.0 * first
