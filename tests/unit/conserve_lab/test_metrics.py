"""Metrics against timelines small enough to work out by hand."""

from typing import Any

import pytest

from conserve_lab.latencies import samples, summarise, token_gaps
from conserve_lab.metrics import evaluate
from conserve_lab.objectives import OBJECTIVES, Objectives, Reference, reference
from conserve_lab.records import TurnRecord


def _turn(
    conversation: str, turn: int, sent_s: float, tokens_s: list[float], ended_s: float, **more: Any
) -> TurnRecord:
    fields: dict[str, Any] = {
        "planned_s": sent_s,
        "outcome": "completed",
        "prompt_tokens": 100,
        "output_tokens": len(tokens_s),
        **more,
    }
    return TurnRecord(
        system="s",
        conversation=conversation,
        turn=turn,
        sent_s=sent_s,
        ended_s=ended_s,
        first_token_s=tokens_s[0] if tokens_s else None,
        token_times_s=tuple(tokens_s),
        **fields,
    )


def _agent(conversation: str = "a", at_s: float = 0.0) -> list[TurnRecord]:
    """Two tool calls, then an answer; gaps of 10 s and 20 s between them.

    Waits: 2 s, 1 s and 3 s; first tokens after 1 s, 0.5 s and 1 s.
    """
    return [
        _turn(conversation, 1, at_s, [at_s + 1, at_s + 1.5, at_s + 2], at_s + 2),
        _turn(conversation, 2, at_s + 12, [at_s + 12.5], at_s + 13),
        _turn(
            conversation,
            3,
            at_s + 33,
            [at_s + 34, at_s + 34.5, at_s + 36],
            at_s + 36,
            effective=True,
            last=True,
        ),
    ]


def test_one_conversation() -> None:
    seen = {metric: found.get("a") for metric, found in samples(_agent()).items()}
    assert seen == {
        "ttft": [1.0, 0.5, 1.0],
        "ttft_first": [1.0],
        "ttft_later": [0.5, 1.0],
        "tbt": [0.5, 1.0],  # A turn of one token has none.
        "tbt_p95": [0.5, pytest.approx(0.5 + 0.95 * 1.0)],
        "tbt_max": [0.5, 1.5],
        "latency": [2.0, 1.0, 3.0],
        "ttfet": [34.0],
        "ttfet_less_gaps": [4.0],
        "last_tbt": [1.0],
        "e2e": [36.0],
        "e2e_less_gaps": [6.0],
    }


def test_ttfet_counts_from_the_first_turn_to_the_first_for_the_user() -> None:
    turns = _agent()
    turns[1].effective = True
    seen = samples(turns)
    assert seen["ttfet"]["a"] == [12.5]
    assert seen["ttfet_less_gaps"]["a"] == [2.5]

    turns[0].effective = True
    assert samples(turns)["ttfet"]["a"] == [1.0]

    for turn in turns:
        turn.effective = False
    result = evaluate(turns)
    assert "ttfet" not in result.latencies
    assert result.without_effective == 1


def test_what_the_driver_lagged_is_no_gap_and_no_latency() -> None:
    turns = _agent()
    turns[1].planned_s -= 5
    assert samples(turns)["e2e_less_gaps"]["a"] == [6.0]


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    turn = _turn("a", 1, 0.0, [1.0, 3.0], 3.0, output_tokens=5)
    assert token_gaps(turn) == [2.0, 0.0, 0.0, 0.0]
    seen = samples([turn])
    assert seen["tbt"]["a"] == [0.5]
    assert seen["tbt_max"]["a"] == [2.0]
    assert token_gaps(_turn("a", 1, 0.0, [1.0, 1.5], 2.0, output_tokens=1)) == [0.5]
    assert token_gaps(_turn("a", 1, 0.0, [], 2.0)) == []


def test_summaries() -> None:
    summary = summarise([1.0, 2.0, 4.0])
    assert (summary.count, summary.p50, summary.max) == (3, 2.0, 4.0)
    assert summary.gmean == pytest.approx(2.0)
    assert summary.mean == pytest.approx(7 / 3)
    assert summary.p95 == pytest.approx(2 + 0.9 * 2)
    assert summary.p99 == pytest.approx(2 + 0.98 * 2)
    # Tokens that came in one part: no time between them, and no word on the others' times.
    assert summarise([0.0, 2.0, 8.0]).gmean == pytest.approx(4.0)
    assert summarise([0.0, 0.0]).gmean == 0.0


def _mixed() -> list[TurnRecord]:
    """One conversation of each fate: done, failed, timed out, cut off in a turn, cut off in a gap.

    100 s from the first request to the last answer.
    """
    return [
        *_agent("done"),
        _turn("failed", 1, 1.0, [2.0, 2.5], 3.0, effective=True),
        _turn("failed", 2, 4.0, [4.5], 5.0, outcome="failed", error="HTTP 503: full"),
        _turn("late", 1, 5.0, [], 65.0, outcome="timeout", error="timeout: 60 s"),
        _turn("open", 1, 50.0, [51.0, 51.5], 52.0),
        _turn("open", 2, 60.0, [61.0], 100.0, outcome="unfinished"),
        _turn("resting", 1, 50.0, [51.0, 51.5], 52.0, effective=True),
    ]


def test_each_fate_counts_as_documented() -> None:
    objectives = Objectives(
        {
            "ttft_first": 1.0,
            "ttft_later": 0.75,
            "tbt": 0.75,
            "ttfet_less_gaps": 4.0,
            "last_tbt": 0.9,
            "e2e_less_gaps": 6.0,
        }
    )
    result = evaluate(_mixed(), objectives)
    assert result.turns == {"completed": 6, "failed": 1, "timeout": 1, "unfinished": 1}
    assert result.conversations == {"completed": 1, "failed": 2, "unfinished": 2}
    assert result.failures == {"HTTP 503": 1, "timeout": 1}
    assert result.latencies["e2e"].count == 1
    assert result.latencies["ttfet"].count == 1
    assert result.latencies["latency"].count == 6
    assert result.without_effective == 0
    assert result.violations == {
        # Four completed first turns in time, and the one that timed out.
        "ttft_first": pytest.approx(1 / 5),
        # Later ones: 0.5 s, 1 s (over), and the failed one.
        "ttft_later": pytest.approx(2 / 3),
        # 0.5, 1 (over), 0.5, 0.5, 0.5, and two failures.
        "tbt": pytest.approx(3 / 7),
        # At the bound is within it; two conversations failed.
        "ttfet_less_gaps": pytest.approx(2 / 3),
        "last_tbt": pytest.approx(3 / 3),
        "e2e_less_gaps": pytest.approx(2 / 3),
    }


def test_rates_count_what_completed() -> None:
    result = evaluate(_mixed(), energy_j=50.0)
    assert result.duration_s == 100.0
    assert result.turns_per_min == pytest.approx(60 * 6 / 100)
    assert result.conversations_per_min == pytest.approx(60 * 1 / 100)
    output = 3 + 1 + 3 + 2 + 2 + 2
    assert result.output_tokens_per_s == pytest.approx(output / 100)
    assert result.total_tokens_per_s == pytest.approx((output + 600) / 100)
    assert result.output_tokens_per_j == pytest.approx(output / 50)
    without = evaluate(_mixed())
    assert (without.energy_j, without.output_tokens_per_j) == (None, None)
    assert (without.violations, without.attainment, without.goodput) == ({}, None, {})


def test_session_attainment_needs_both() -> None:
    # TTFT of the first turn: 1 s. Between tokens: 0.5, 0.5, 0.5, 1.5 s: 0.75 s in the mean.
    def attained(ttft_s: float, tbt_s: float, records: list[TurnRecord]) -> float | None:
        bounds = Objectives({"ttft_first": ttft_s, "tbt": tbt_s})
        return evaluate(records, bounds).attainment

    assert attained(1.0, 0.75, _agent()) == 1.0
    assert attained(0.99, 0.75, _agent()) == 0.0
    assert attained(1.0, 0.74, _agent()) == 0.0
    # Two failed sessions of three; the unfinished ones are none yet.
    assert attained(1.0, 0.75, _mixed()) == pytest.approx(1 / 3)
    assert attained(1.0, 0.75, [_mixed()[-1]]) is None
    assert evaluate(_agent(), Objectives({"tbt": 1.0})).attainment is None


def _reference(**served_s: float) -> Reference:
    return Reference({}, served_s, 0.0, 0.0, 0.0)


def test_goodput_is_the_rate_of_those_in_time_for_their_ideal() -> None:
    # Two conversations, 36 s each, of which 30 s are gaps; the second starts at 64 s.
    records = [*_agent("a"), *_agent("b", 64.0)]
    result = evaluate(records, unloaded=_reference(a=6.0, b=2.0))
    assert result.duration_s == 100.0
    # Targets of b: 32, 64 and 96 s.
    assert result.goodput == {"1": 1 / 100, "2": 2 / 100, "3": 2 / 100}
    # The failed and the unfinished are not good, however quick.
    slow = evaluate(_mixed(), unloaded=_reference(done=6.0, failed=99.0, resting=99.0))
    assert slow.goodput["3"] == 1 / 100


def test_the_reference() -> None:
    unloaded = reference([*_agent("a"), *_agent("b", 100.0)])
    assert set(unloaded.baseline_s) == set(OBJECTIVES)
    assert unloaded.baseline_s["ttft_first"] == pytest.approx(1.0)
    assert unloaded.baseline_s["ttft_later"] == pytest.approx(0.5**0.5)
    assert unloaded.baseline_s["e2e_less_gaps"] == pytest.approx(6.0)
    assert unloaded.served_s == {"a": 6.0, "b": 6.0}
    bounds = Objectives.from_reference(unloaded, 5.0).bounds_s
    assert bounds["ttfet_less_gaps"] == pytest.approx(20.0)
    with pytest.raises(ValueError, match="no conversation of the unloaded run completed"):
        reference([_mixed()[-1]])


def test_ideal_times_are_estimated_from_tokens() -> None:
    # Latency = 0.5 s + 1 ms a new token + 20 ms an output token.
    def turn(name: str, number: int, prompt: int, reused: int | None, output: int) -> TurnRecord:
        latency_s = 0.5 + 0.001 * (prompt - (reused or 0)) + 0.02 * output
        return _turn(
            name,
            number,
            10.0 * number,
            [10.0 * number + 0.1],
            10.0 * number + latency_s,
            prompt_tokens=prompt,
            reused_tokens=reused,
            output_tokens=output,
            last=number == 3,
        )

    seen = [turn("a", 1, 1000, 0, 10), turn("a", 2, 1200, 900, 50), turn("a", 3, 3000, 1200, 20)]
    unloaded = reference(seen)
    assert unloaded.fixed_s == pytest.approx(0.5)
    assert unloaded.per_new_token_s == pytest.approx(0.001)
    assert unloaded.per_output_token_s == pytest.approx(0.02)
    other = [turn("b", 1, 500, 0, 5), turn("b", 2, 700, 500, 5)]
    assert unloaded.ideal_s(other) == pytest.approx(1.1 + 0.8)
    # Without a plan, a prompt is taken to continue the one before it.
    other[1].reused_tokens = None
    assert unloaded.ideal_s(other) == pytest.approx(1.1 + 0.8)
    assert unloaded.ideal_s(seen) == unloaded.served_s["a"]


def test_cache_shares_are_of_what_is_known() -> None:
    turns = [
        _turn("a", 1, 0.0, [1.0], 2.0, cached_tokens=0, reused_tokens=0),
        _turn("a", 2, 3.0, [4.0], 5.0, prompt_tokens=300, cached_tokens=100, reused_tokens=200),
        _turn("a", 3, 6.0, [7.0], 8.0, prompt_tokens=500, server="d2"),
    ]
    result = evaluate(turns)
    assert result.cached_share == pytest.approx(100 / 400)
    assert result.reusable_share == pytest.approx(200 / 400)
    assert result.servers == {"d2": 1}
    assert evaluate(turns[2:]).cached_share is None
