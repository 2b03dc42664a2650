"""What an engine says of its work, by what vLLM tells of requests and iterations."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefillStats, SchedulerStats

from conserve.placement.load import EngineLoad
from deployments.engine import load
from deployments.engine.load import ALL_TOKENS, WINDOW_S, Lately, LoadMeter, measure


@dataclass
class Request:
    """As vLLM keeps it."""

    external_req_id: str
    prompt_len: int
    is_prefilling: bool = True


def meter(**requests: Request) -> LoadMeter:
    return LoadMeter(requests)


def step(
    meter: LoadMeter,
    now_s: float,
    *gaps_s: float,
    running: int | None = None,
    ended: int = 0,
) -> None:
    """An iteration in which some decode and no prompt is done."""
    running = len(gaps_s) - ended if running is None else running
    meter.iteration(
        now_s, gaps_s=gaps_s, waits_s=(), computed_tokens=0, ended=ended, running=running
    )


def prefill(meter: LoadMeter, now_s: float, tokens: int, *waits_s: float) -> None:
    """An iteration after which prompts are done, of which so much was in no cache."""
    meter.iteration(
        now_s, gaps_s=(0.5,), waits_s=waits_s, computed_tokens=tokens, ended=0, running=2
    )


def test_an_engine_with_nothing_to_do_says_so() -> None:
    assert meter().load(100.0) == EngineLoad()


def test_what_waits_counts_until_its_first_token() -> None:
    waits, decodes = Request("a", 900), Request("b", 300, is_prefilling=False)
    one = meter(a=waits, b=decodes, c=Request("c", 100))
    assert one.load(0) == EngineLoad(prefill_tokens=1000, decodes=1)
    waits.is_prefilling = False
    assert one.load(0) == EngineLoad(prefill_tokens=100, decodes=2)


def test_choices_have_one_prompt() -> None:
    one = meter(x=Request("a", 900), y=Request("a", 900), z=Request("b", 50))
    assert one.load(0).prefill_tokens == 950


def test_what_caches_should_have_does_not_count() -> None:
    one = meter(a=Request("a", 900), b=Request("b", 40))

    async def scenario() -> None:
        async with one.expecting("a", 850):
            assert one.load(0).prefill_tokens == 90
            async with one.expecting("b", ALL_TOKENS):
                assert one.load(0).prefill_tokens == 50
        assert one.load(0).prefill_tokens == 940
        with pytest.raises(ConnectionError):
            async with one.expecting("a", 850):
                raise ConnectionError
        assert one.load(0).prefill_tokens == 940

    asyncio.run(scenario())


def test_an_iteration_takes_as_long_as_the_shortest_gap_between_tokens() -> None:
    one = meter()
    step(one, 10.0, 0.03, 0.02)  # One of them was preempted meanwhile.
    step(one, 10.1, 0.04)
    assert one.load(11).step_s == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("running", "ended", "counts"),
    [(2, 0, True), (1, 1, True), (0, 2, True), (3, 0, False), (2, 1, False)],
)
def test_an_iteration_counts_where_whoever_runs_puts_out_a_token(
    running: int, ended: int, counts: bool
) -> None:
    """If not, a part of a prompt may have been computed beside the decodes."""
    one = meter()
    step(one, 10.0, 0.02, 0.02, running=running, ended=ended)
    assert bool(one.load(11).step_s) == counts


def test_an_iteration_with_a_prefill_says_nothing_of_those_without() -> None:
    one = meter()
    prefill(one, 10.0, 700, 0.1)
    assert one.load(11).step_s == 0


def test_prompts_that_wait_for_each_other_share_their_time() -> None:
    one = meter()
    prefill(one, 10.0, 1000, 0.2)
    # They came while the first was computed, and were done 0.3 s after it.
    prefill(one, 10.3, 2000, 0.4, 0.35)
    assert one.load(11).prefill_tokens_per_s == pytest.approx(3000 / 0.5)
    # Then there was none for a while.
    prefill(one, 20.0, 3000, 0.5)
    assert one.load(21).prefill_tokens_per_s == pytest.approx(6000 / 1.0)


def test_the_end_of_a_prompt_that_was_in_caches_says_nothing_of_the_speed() -> None:
    one = meter()
    prefill(one, 10.0, 127, 0.2)
    assert one.load(11).prefill_tokens_per_s == 0
    prefill(one, 10.0, 128, 0.2)
    assert one.load(11).prefill_tokens_per_s == pytest.approx(640)


def test_what_was_long_ago_is_not_known() -> None:
    one = meter()
    prefill(one, 10.0, 1000, 0.5)
    step(one, 10.0, 0.02)
    assert one.load(10.0 + WINDOW_S - 1).step_s
    assert one.load(10.0 + WINDOW_S).step_s == 0
    assert one.load(10.0 + WINDOW_S).prefill_tokens_per_s == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=80),
    st.integers(0, 90),
)
def test_a_mean_is_that_of_the_window(seen: list[tuple[int, int]], later_s: int) -> None:
    """However long it has been going on, as much is kept."""
    lately, now_s, all_seen = Lately(), 0, []
    for after_s, value in seen:
        now_s += after_s
        lately.add(value, 1, now_s)
        all_seen.append((now_s, value))
    now_s += later_s
    recent = [value for at_s, value in all_seen if at_s > now_s - WINDOW_S]
    expected = sum(recent) / len(recent) if recent else 0
    assert lately.mean(now_s) == pytest.approx(expected)
    assert len(lately._seconds) <= WINDOW_S


class Client:
    """As much of an ``AsyncLLM`` as is metered; tells its loggers what happens."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={})
        self.logger_manager = SimpleNamespace(stat_loggers=[])

    def record(self, stats: Any, iteration: Any) -> None:
        """As vLLM's ``StatLoggerManager`` does."""
        for logger in self.logger_manager.stat_loggers:
            logger.record(stats, iteration, mm_cache_stats=None, engine_idx=0)


def test_vllm_tells_of_its_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load.time, "monotonic", lambda: 50.0)
    client = Client()
    meter = measure(client)
    client.record(SchedulerStats(), None)
    client.record(None, IterationStats())
    prompts = IterationStats()
    done = PrefillStats()
    done.set(num_prompt_tokens=900, num_local_cached_tokens=100, num_external_cached_tokens=0)
    prompts.prompt_token_stats.update_from_output(done)
    prompts.time_to_first_tokens_iter = [0.4]
    client.record(SchedulerStats(num_running_reqs=1), prompts)
    decodes = IterationStats()
    decodes.inter_token_latencies_iter = [0.01, 0.01]
    decodes.finished_requests = [FinishedRequestStats(finish_reason=None)]  # type: ignore[arg-type]
    client.record(SchedulerStats(num_running_reqs=1), decodes)
    client.output_processor.request_states["r-1"] = Request("r", 70)
    assert meter.load(51.0) == EngineLoad(70, 0, pytest.approx(0.01), pytest.approx(2000))


def test_without_statistics_times_are_not_known() -> None:
    client = Client()
    client.logger_manager = None
    client.output_processor.request_states["r-1"] = Request("r", 70, is_prefilling=False)
    assert measure(client).load(1.0) == EngineLoad(decodes=1)
