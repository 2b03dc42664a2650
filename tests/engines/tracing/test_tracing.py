"""Turns on real engines as a collector, and as the log has them.

The application's other tests run without a collector at its endpoint.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.collector import Collector, Span
from tests.engines.applications import COLLECTOR_PORT, MAIN
from tests.engines.client import TIMEOUT_S, Agent, chat, engines, prose
from tests.engines.processes import kill, processes
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

LOGS = Path("/tmp/ray/session_latest/logs")
PARENT = "00f067aa0ba902b7"
# vLLM's own span of a request.
ENGINES_OWN = "llm_request"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """One where the application sends its spans."""
    with Collector(COLLECTOR_PORT) as one:
        yield one


def _traceparent(rng: random.Random) -> tuple[str, str]:
    trace_id = f"{rng.getrandbits(128):032x}"
    return trace_id, f"00-{trace_id}-{PARENT}-01"


def _whole(spans: list[Span]) -> Span | None:
    return next((span for span in spans if span.parent_id == PARENT), None)


async def _traced(collector: Collector, trace_id: str, requests: int) -> tuple[Span, list[Span]]:
    """The turn's span and the others of its trace, with at least so many of vLLM's."""

    def there() -> bool:
        spans = collector.trace(trace_id)
        own = [span for span in spans if span.name == ENGINES_OWN]
        return _whole(spans) is not None and len(own) >= requests

    await eventually(f"the whole trace {trace_id}", there)
    spans = collector.trace(trace_id)
    whole = _whole(spans)
    assert whole is not None
    return whole, [span for span in spans if span is not whole]


def _lines() -> list[dict[str, Any]]:
    written = (LOGS / "serve" / "conserve_default.log").read_text().splitlines()
    return [json.loads(line) for line in written]


@pytest.mark.application(MAIN)
async def test_a_first_and_a_later_turn(
    application: str, collector: Collector, client: httpx.AsyncClient, rng: random.Random
) -> None:
    prompt, trace = prose(rng, 900), {}
    turns: list[tuple[Span, list[Span]]] = []
    messages = [{"role": "user", "content": prompt}]
    for number, requests in ((1, 2), (2, 1)):
        trace_id, traceparent = _traceparent(rng)
        headers = {"traceparent": traceparent, "x-request-id": f"traced-{number}"}
        reply = await chat(
            client, messages, "traced", tokens=16, stream=number == 2, headers=headers
        )
        assert reply.status == 200
        answer = {"role": "assistant", "content": reply.content}
        messages += [answer, {"role": "user", "content": "go on"}]
        turns.append(await _traced(collector, trace_id, requests))
        trace[number] = trace_id

    (first, of_first), (later, of_later) = turns
    decoder, (prefiller,) = first.attributes["conserve.engine"], engines("prefiller")
    phases = [(one.name, one.attributes.get("conserve.engine")) for one in of_first]
    # The first is counted, waits for a place, is prefilled elsewhere and handed off.
    for phase in (
        ("recognition", None),
        ("wait", None),
        ("prefill", prefiller["id"]),
        ("handoff", decoder),
        ("prefill", decoder),
        ("decode", decoder),
    ):
        assert phase in phases, phases
    assert "count" in dict(phases)
    assert {one.service for one in of_first} == {
        "conserve-router", "conserve-prefiller", "conserve-decoder",
    }  # fmt: skip
    # A later one runs where its history is.
    phases = [(one.name, one.attributes.get("conserve.engine")) for one in of_later]
    for phase in (("recognition", None), ("wait", decoder), ("prefill", decoder)):
        assert phase in phases, phases
    assert not {"count", "handoff"} & set(dict(phases))
    for whole, spans in turns:
        assert {one.parent_id for one in spans} == {whole.id}
        assert not any(one.failed for one in [whole, *spans])
        assert whole.attributes["gen_ai.conversation.id"] == "traced"
        assert whole.attributes["gen_ai.usage.output_tokens"] > 0
        assert whole.began_ns <= min(one.began_ns for one in spans)
    reasons = [one.attributes["conserve.placement.reason"] for one in (first, later)]
    assert reasons == ["new", "home"]
    assert first.attributes["conserve.loaded_tokens"] > 800
    assert later.attributes["gen_ai.usage.cache_read.input_tokens"] > 800

    # The log has a line for each, and neither it nor the trace has what was said.
    lines = {one.get("request_id"): one for one in _lines() if one.get("event") == "turn"}
    for number, (whole, _) in enumerate(turns, 1):
        line = lines[f"traced-{number}"]
        assert (line["outcome"], line["conversation"]) == ("completed", "traced")
        assert line["engine"] == decoder
        assert line["prompt_tokens"] == whole.attributes["gen_ai.usage.input_tokens"]
        assert line["latency_s"] >= line["decode_s"] > 0
    said = prompt[:40]
    assert said not in json.dumps(_lines())
    assert said not in str(collector.spans)


@pytest.mark.application(MAIN)
async def test_a_slow_turn_says_why_wherever_it_is_told(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    agent = Agent(client, "rewritten", [{"role": "system", "content": prose(rng, 200)}])
    for _ in range(2):
        await agent.say(prose(rng, 20), tokens=8)
        # A slow machine may have waited long for its prefill.
        assert "prefix broken" not in str(agent.stats[-1].get("why"))
    agent.messages[0] = {"role": "system", "content": prose(rng, 200)}
    reply = await agent.say(prose(rng, 20), tokens=8)
    why = agent.stats[-1]["why"]
    broken = "prefix broken at its beginning: the client changed its system prompt ("
    assert str(why).startswith(broken)
    (line,) = await _turn_lines(reply.headers["x-request-id"])
    assert line["why"] == why
    shown = (await client.get(f"{application}/v1/conversations/rewritten")).json()
    ends = [one for one in shown["events"] if one["kind"] == "end"]
    assert ends[-1]["why"] == why


async def _turn_lines(request_id: str) -> list[dict[str, Any]]:
    """The lines of a turn in the log, of which there is one at least."""

    def found() -> list[dict[str, Any]]:
        return [one for one in _lines() if one.get("request_id") == request_id]

    await eventually("the turn is logged", lambda: bool(found()))
    return found()


@pytest.mark.application(MAIN)
async def test_short_prompts_leave_no_warnings(application: str, client: httpx.AsyncClient) -> None:
    """LMCache has nothing of a prompt shorter than a chunk, and warned of each."""
    reply = await chat(client, [{"role": "user", "content": "hello"}], "short", tokens=4)
    assert reply.status == 200
    await eventually("the turn is logged", lambda: _lines()[-1].get("conversation") == "short")
    found = await asyncio.to_thread(_with, "skipping touch")
    assert not found


def _with(text: str) -> list[Path]:
    return [log for log in LOGS.glob("*.err") if text in log.read_text(errors="replace")]


@pytest.mark.full
@pytest.mark.application(MAIN, last=True)
async def test_a_stream_that_moves(
    application: str,
    stage: Stage,
    collector: Collector,
    client: httpx.AsyncClient,
    rng: random.Random,
) -> None:
    """The decoder that goes on with it is in the same trace."""
    agent = Agent(client, "moves")
    await agent.say(prose(rng, 300), tokens=8)
    lost = agent.replies[0].decoder
    pid = next(engine["pid"] for engine in engines("decoder") if engine["id"] == lost)
    trace_id, traceparent = _traceparent(rng)
    agent.messages.append({"role": "user", "content": "a long story, please"})
    began = asyncio.Event()
    telling = asyncio.ensure_future(
        agent.ask(tokens=150, stream=True, began=began, headers={"traceparent": traceparent})
    )
    await asyncio.wait_for(began.wait(), TIMEOUT_S)
    kill(processes("EngineCore", below=pid)[0].pid)
    assert (await telling).status == 200
    # The lost one tells nothing.
    whole, spans = await _traced(collector, trace_id, 1)
    assert [one.service for one in spans if one.name == ENGINES_OWN][-1] == "conserve-decoder"
    assert whole.attributes["conserve.continued"] == 1
    assert whole.attributes["conserve.placement.reason"] == "moved"
    decodes = [one for one in spans if one.name == "decode"]
    assert [one.failed for one in decodes] == [True, False]
    assert decodes[0].attributes["conserve.engine"] == lost
    assert decodes[1].attributes["conserve.engine"] == whole.attributes["conserve.engine"] != lost
    assert [one["why"] for one in _lines() if one.get("engine") == lost and "why" in one]
    await asyncio.to_thread(stage.wait_until_whole)
