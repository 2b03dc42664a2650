"""The trace of a turn, as a collector has it; and that turns need no collector."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.trace import SpanKind

from conserve.turn import TurnStats
from deployments.messages import Checked
from deployments.router.spans import Spans
from deployments.router.upstream import TRACE_HEADERS, Upstream
from tests.collector import Collector, Span
from tests.unit.deployments.router.fakes import (
    STREAMED,
    FakeEngines,
    FakeTable,
    answering,
    endpoint_of,
    exchange,
)

CLIENTS = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SUMMARY = TurnStats(
    600, 4, 0, 512, reused_tokens=0, engine_queued_s=0.0001, engine_prefill_s=0.0001,
    decode_s=0.0001,
)  # fmt: skip


@dataclass
class Traced(FakeEngines):
    """Decoders that note to which trace they were told that each request belongs."""

    told: list[tuple[str, str]] = field(default_factory=list)

    def _note(self, what: str) -> None:
        headers = TRACE_HEADERS.get()
        if headers is not None:
            self.told.append((what, headers["traceparent"]))

    def _serve(self, url: str) -> str:
        self._note(url.removeprefix("http://").partition("/")[0])
        return super()._serve(url)

    async def check(self, url: str, path: str, raw: bytes) -> Checked:
        self._note("check")
        return await super().check(url, path, raw)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """One that answers."""
    with Collector() as one:
        yield one


@pytest.fixture(autouse=True)
def all_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Spans]]:
    """Those that tests make, which come to their end."""
    made: list[Spans] = []
    begin = Spans.__init__

    def noted(self: Spans, *given: Any) -> None:
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(Spans, "__init__", noted)
    yield made
    for one in made:
        one._processor._batch_processor.shutdown(timeout_millis=0)


def a_turn(
    collector: Collector,
    made: list[Spans],
    engines: FakeEngines,
    body: dict[str, Any] = STREAMED,
    **headers: str,
) -> list[Span]:
    """Have a turn served, and return the spans that come of it, parents last."""
    before = len(collector.spans)
    both = FakeTable(prefillers=1), engines
    exchange(both, body, headers=headers, **{"tracing.endpoint": collector.url})
    made[-1]._processor.force_flush()
    return collector.spans[before:]


def test_a_turn_is_one_trace_with_a_span_for_each_phase(
    collector: Collector, all_spans: list[Spans]
) -> None:
    engines = Traced(summary=SUMMARY, prefilled=TurnStats(prefilled_tokens=600))
    given = {"traceparent": f"00-{CLIENTS}-{PARENT}-01", "x-request-id": "mine"}
    *phases, whole = a_turn(collector, all_spans, engines, **given)
    assert {span.trace_id for span in [*phases, whole]} == {CLIENTS}
    assert {span.service for span in phases} == {"conserve-router"}
    assert (whole.parent_id, whole.kind) == (PARENT, SpanKind.SERVER.value + 1)
    assert {span.parent_id for span in phases} == {whole.id}
    assert [(span.name, span.attributes.get("conserve.engine")) for span in phases] == [
        ("recognition", None),
        ("count", "tokenizer"),
        ("wait", None),
        ("prefill", "p1"),
        ("handoff", "d1"),
        ("prefill", "d1"),
        ("decode", "d1"),
    ]
    # One after the other, and all within the turn.
    assert whole.began_ns <= phases[0].began_ns
    for one, next_ in zip(phases, [*phases[1:]], strict=False):
        assert one.began_ns <= one.ended_ns <= whole.ended_ns
        assert one.began_ns <= next_.began_ns
    assert whole.name == "chat conserve-embedded"
    assert whole.attributes.pop("conserve.ttft_s") > 0
    assert whole.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "conserve",
        "gen_ai.request.model": "conserve-embedded",
        "gen_ai.conversation.id": "c",
        "gen_ai.usage.input_tokens": 600,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "url.path": "/v1/chat/completions",
        "conserve.request.id": "mine",
        "conserve.outcome": "completed",
        "conserve.engine": "d1",
        "conserve.prefiller": "p1",
        "conserve.placement.reason": "home",
        "conserve.cached_tokens": 0,
        "conserve.loaded_tokens": 512,
    }
    # All engines are told, so that their spans are the turn's children.
    assert engines.told == [(what, f"00-{CLIENTS}-{whole.id}-01") for what in ("check", "p1", "d1")]


def test_a_stream_that_moves_stays_one_trace(collector: Collector, all_spans: list[Spans]) -> None:
    engines = Traced(after={"d1": 2}, summary=SUMMARY)
    *phases, whole = a_turn(collector, all_spans, engines)
    decodes = [span for span in phases if span.name == "decode"]
    assert [span.attributes["conserve.engine"] for span in decodes] == ["d1", "d2"]
    assert [span.failed for span in decodes] == [True, False]
    assert decodes[0].attributes["error.type"] == "EngineUnreachable"
    assert not whole.failed
    assert whole.attributes["conserve.continued"] == 1
    assert {span.trace_id for span in phases} == {whole.trace_id}
    assert {value for _, value in engines.told} == {f"00-{whole.trace_id}-{whole.id}-01"}


def test_a_turn_that_is_refused_is_a_span_with_its_error(
    collector: Collector, all_spans: list[Spans]
) -> None:
    (whole,) = a_turn(collector, all_spans, Traced(), {"messages": "SECRET"})
    assert whole.failed
    assert whole.attributes["conserve.outcome"] == "refused"
    assert whole.attributes["error.type"]
    assert "SECRET" not in str(whole)


def test_nothing_is_said_of_what_a_client_wants_untraced(
    collector: Collector, all_spans: list[Spans]
) -> None:
    engines = Traced()
    assert not a_turn(collector, all_spans, engines, traceparent=f"00-{CLIENTS}-{PARENT}-00")
    # Engines follow, where they trace at all.
    assert {value[-3:] for _, value in engines.told} == {"-00"}
    # A header that is none begins a trace of its own.
    *_, whole = a_turn(collector, all_spans, engines, traceparent="00-zz")
    assert whole.parent_id == ""


async def test_an_engine_gets_the_header_and_only_of_the_turn_that_is_traced() -> None:
    asked: list[bytes] = []
    done = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    async def ask(traced: bool) -> None:
        if traced:
            TRACE_HEADERS.set({"traceparent": f"00-{CLIENTS}-{PARENT}-01"})
        await upstream.answered(url, b"{}")

    upstream = Upstream(silence_s=5)
    async with answering(done, asked) as url:
        await asyncio.create_task(ask(traced=True))
        await asyncio.create_task(ask(traced=False))
    await upstream._open().close()
    assert [b"traceparent: 00-" in one.lower() for one in asked] == [True, False]


@pytest.mark.parametrize("there", [True, False], ids=["never answers", "is not there"])
def test_a_dead_collector_holds_up_no_turn(
    there: bool, all_spans: list[Spans], caplog: pytest.LogCaptureFixture
) -> None:
    """More spans than its queue has room for, which are made and dropped meanwhile."""
    with Collector(answers=False) as collector:
        url = collector.url
        if not there:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        table = FakeTable(prefillers=1)
        exchange((table, Traced()), STREAMED, **{"tracing.endpoint": url})
        assert table.told[-1][1].outcome == "completed"
        if there:
            collector.wait_for(lambda: collector.asked)
        spans = all_spans[-1]
        queue = spans._processor._batch_processor._queue
        assert queue.maxlen == 2048
        scope = {"type": "http", "path": "/v1/chat/completions", "headers": []}
        stats = TurnStats(outcome="completed", latency_s=1.0)
        for _ in range(2 * queue.maxlen):
            spans.begin(scope, time.perf_counter()).end(None, stats)
        # Nothing waited for the collector, which has answered nothing yet.
        assert len(queue) > queue.maxlen / 2


def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    assert endpoint_of(FakeTable(), Traced()).spans is None
    code = (
        "import sys, deployments.router.frontdoor\n"
        "assert 'deployments.router.spans' not in sys.modules\n"
        "assert 'opentelemetry' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
