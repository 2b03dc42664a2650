"""What an engine says of its work, by what vLLM tells of requests and iterations."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from conserve.placement import EngineLoad, Step
from conserve.wire import OVERDUE, STEPS
from deployments.engine.reporter import ALL_TOKENS, WINDOW_S, Lately, LoadMeter, measure


@dataclass
class Request:
    """As vLLM keeps it."""

    external_req_id: str
    prompt_len: int
    is_prefilling: bool = True


def meter(**requests: Request) -> LoadMeter:
    return LoadMeter(requests)


def test_an_engine_with_nothing_to_do_says_so() -> None:
    assert meter().load(100.0) == EngineLoad()


def test_what_waits_counts_until_its_first_token() -> None:
    waits, decodes = Request("a", 900), Request("b", 300, is_prefilling=False)
    one = meter(a=waits, b=decodes, c=Request("c", 100))
    assert one.waiting_tokens() == 1_000
    assert one.load(0) == EngineLoad(prefill_tokens=1000, decodes=1)
    waits.is_prefilling = False
    assert one.load(0) == EngineLoad(prefill_tokens=100, decodes=2)


def test_choices_have_one_prompt() -> None:
    one = meter(x=Request("a", 900), y=Request("a", 900), z=Request("b", 50))
    assert one.load(0).prefill_tokens == 950


async def test_what_caches_should_have_does_not_count() -> None:
    one = meter(a=Request("a", 900), b=Request("b", 40))
    async with one.expecting("a", 850):
        assert one.load(0).prefill_tokens == 90
        async with one.expecting("b", ALL_TOKENS):
            assert one.load(0).prefill_tokens == 50
    assert one.load(0).prefill_tokens == 940
    with pytest.raises(ConnectionError):
        async with one.expecting("a", 850):
            raise ConnectionError
    assert one.load(0).prefill_tokens == 940


async def test_images_that_have_to_be_encoded_count_until_the_first_token() -> None:
    first, other = Request("a", 900), Request("a", 900)
    one = meter(a=first, b=other)
    async with one.expecting("a", 0, 64):
        assert one.load(0).encode_tokens == 64
        first.is_prefilling = other.is_prefilling = False
        assert one.load(0).encode_tokens == 0


def test_iterations_are_told_of_once_and_make_means() -> None:
    one = meter()
    decodes, prefill = Step(0.02, decodes=3, count=3), Step(0.5, 1000, 10**6, decodes=2)
    one.took([decodes, prefill, Step(0.06, decodes=1)], 10.0)
    # Of few tokens the time is that of any iteration.
    one.took([Step(0.02, 127, 127**2)], 10.0)
    load = one.load(11.0)
    assert load.steps == (decodes, prefill, Step(0.06, decodes=1), Step(0.02, 127, 127**2))
    assert load.step_s == pytest.approx(0.03)
    assert load.prefill_tokens_per_s == pytest.approx(2000)
    assert one.load(11.0).steps == ()
    assert one.load(10.0 + WINDOW_S).step_s == 0
    assert one.load(10.0 + WINDOW_S).prefill_tokens_per_s == 0


def test_of_many_iterations_the_newest_are_told() -> None:
    one = meter()
    one.took((Step(float(number + 1)) for number in range(1000)), 10.0)
    told = one.load(11.0).steps
    assert len(told) < 100
    assert told[-1].lasted_s == 1000
    one.took([Step(1.0)], 12.0)
    one.forget()
    assert one.load(12.0).steps == ()


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


def test_vllm_tells_of_what_the_connector_has_metered() -> None:
    client = Client()
    silent_s: list[float] = []
    meter = measure(client, list, silent_s.append)
    client.record(None, IterationStats())
    client.record(SchedulerStats(), None)
    client.record(SchedulerStats(kv_connector_stats={"other": [1.0]}), None)
    step = Step(0.5, 1000, 10**6, 2, 900)
    client.record(SchedulerStats(kv_connector_stats={STEPS: [list(astuple(step))]}), None)
    client.output_processor.request_states["r-1"] = Request("r", 70)
    load = meter.load(time.monotonic())
    assert (load.prefill_tokens, load.steps) == (70, (step,))
    for waited_s in ([40.0, 150.0], [31.0]):
        client.record(SchedulerStats(kv_connector_stats={OVERDUE: waited_s}), None)
    assert silent_s == [150.0, 31.0]
    assert meter.load(time.monotonic()).overdue_loads == 3


def test_without_statistics_times_are_not_known() -> None:
    client = Client()
    client.logger_manager = None
    client.output_processor.request_states["r-1"] = Request("r", 70, is_prefilling=False)
    assert measure(client, list, print).load(1.0) == EngineLoad(decodes=1)
