"""What listeners are told of turns and engines, and a client of its conversation."""

import asyncio
import json

import msgspec
import pytest

from conserve.events import EventLog
from conserve.hints import Hints
from conserve.placement import EngineLoad
from conserve.turn import TurnStats
from deployments.messages import EventPage, EventQuery
from deployments.table import views
from deployments.table.views import listen
from tests.unit.deployments.table.test_table import TOKENS, a_full_service, a_service
from tests.unit.deployments.table.virtual_time import in_virtual_time


async def test_what_happens_is_told_in_order() -> None:
    service = await a_full_service()
    # So much that prompts are prefilled elsewhere.
    await service.beat("decoder#1", None, EngineLoad(decodes=9, step_s=0.02))
    began = (await service.events(EventQuery(None))).newest
    waiting = await service.queued(tokens=TOKENS, hints=Hints(parent="acme\tboss"))
    await service.release("full")
    plan = service.planned(await waiting)
    await service.prefilled(plan, TurnStats(prefilled_tokens=TOKENS, prefiller_lmcache_tokens=100))
    stats = TurnStats(
        TOKENS, 5, 0, 512, engine_wait_s=0.25, engine_wait_for="step", kept_tokens=640,
        kept_s=2.0, encode_wait_s=0.0, encode_s=0.5, decode_s=1.25,
    )  # fmt: skip
    service._running.advance(plan.turn, plan.decoder_id, stats, (b"c" * 16,))
    last = msgspec.to_builtins(await service.conversation("c"))["last_turn"]
    times_s = [last[f"{one}_s"] for one in ("encode_wait", "encode", "prefill", "decode")]
    assert times_s == [0.0, 0.5, 0.0, 1.25]
    await service.observe(plan.turn, TurnStats(outcome="completed", latency_s=1.5, ttft_s=0.5))
    plan = await service.later()
    # Its decoder and its router may both say so.
    for _ in range(2):
        service._running.abandon(plan.turn, "decoder#1")
    await service.engine_lost("decoder#1", "as it happens")

    page = await service.events(EventQuery(began))
    told = [json.loads(data) for _, _, data in page.events]
    assert [one["number"] for one in told] == list(range(began + 1, page.newest + 1))
    assert [one["kind"] for one in told] == [kind for _, kind, _ in page.events]
    assert len(told) == 10  # Two turns have begun.
    by_kind = {(one["kind"], one.get("conversation")): one for one in told}
    assert [*by_kind] == [
        ("wait", "c"), ("ended", "full"), ("place", "c"), ("start", "c"), ("prefilled", "c"),
        ("end", "c"), ("answered", "c"), ("cut", "c"), ("engine_lost", None),
    ]  # fmt: skip
    wait = by_kind["wait", "c"]
    assert (wait["ahead"], wait["missing_tokens"]) == (0, 2 * TOKENS - 1000)
    place = by_kind["place", "c"]
    assert (place["decoder"], place["prefiller"]) == ("decoder#1", "prefiller#1")
    assert place["parent"] == "boss"
    assert by_kind["prefilled", "c"]["loaded_tokens"] == 100
    text = (await service.metrics()).decode()
    # The prefiller computed all but 100, and the decoder what was not in LMCache.
    counted = {"computed": TOKENS - 100 + TOKENS - 512, "cached": 512 - (TOKENS - 100), "output": 5}
    for kind, tokens in counted.items():
        line = f'conserve_tokens_total{{kind="{kind}",tenant=""}} {tokens}.0'
        assert line in text.splitlines()
    end = by_kind["end", "c"]
    assert end["loaded_tokens"] == 512
    assert (end["engine_wait_s"], end["engine_wait_for"]) == (0.25, "step")
    assert (end["kept_tokens"], end["kept_s"]) == (640, 2.0)
    assert (end["encode_wait_s"], end["encode_s"], end["decode_s"]) == (0.0, 0.5, 1.25)
    assert "prefill_s" not in end
    assert by_kind["answered", "c"]["ttft_s"] == 0.5
    lost = by_kind["engine_lost", None]
    assert (lost["engine"], lost["unbound"], lost["why"]) == ("decoder#1", 1, "as it happens")

    metrics = (await service.metrics()).decode()
    assert 'conserve_events_total{kind="start"} 3.0' in metrics
    assert 'conserve_events_total{kind="pause"} 0.0' in metrics
    # Only stages that the turn went through count, and no wait is a wait of 0.
    assert 'conserve_stage_seconds_count{stage="encode_wait"} 1.0' in metrics
    assert 'conserve_stage_seconds_sum{stage="encode"} 0.5' in metrics
    assert 'conserve_stage_seconds_sum{stage="decode"} 1.25' in metrics
    assert '{stage="prefill"}' not in metrics
    # Some of it, and of some.
    some = await service.events(EventQuery(began, ("place", "cut"), None, "c"))
    assert [kind for _, kind, _ in some.events] == ["place", "cut"]
    assert some.newest == page.newest
    assert (await service.events(EventQuery(began, (), None, "full"))).events[0][1] == "ended"
    assert (await service.events(EventQuery(began, (), "acme"))).events == []
    # A number that there is not yet is taken for the newest.
    ahead = EventQuery(page.newest + 10**6)
    assert await service.events(ahead) == EventPage(page.newest, 0, [])
    assert (await service.events(EventQuery(0))).events[0][1] == "engine_ready"


@in_virtual_time
async def test_who_listens_hears_of_it_as_it_happens_or_after_a_while_that_nothing_did() -> None:
    service = await a_full_service()
    newest = (await service.events(EventQuery(None))).newest
    nothing = await service.events(EventQuery(newest, (), None, None, 10.0))
    assert nothing == EventPage(newest, 0, [])
    asked = EventQuery(newest, ("ended",), None, None, 10.0)
    listening = asyncio.create_task(service.events(asked))
    await asyncio.sleep(5)
    assert not listening.done()
    await service.release("full")
    assert [kind for _, kind, _ in (await listening).events] == ["ended"]


async def test_a_conversation_says_what_happened_to_it_and_nobody_elses() -> None:
    service = await a_service()
    for id_ in ("acme\tc", "ops\tc"):
        await service.turn(id_, 300)
    shown = msgspec.to_builtins(await service.conversation("acme\tc"))
    assert [one["kind"] for one in shown["events"]] == ["place", "start"]
    # From numbers it could be told how much others do, or how full decoders are.
    numbered = {"number", "turn", "history", "ahead", "missing_tokens", "decoders"}
    assert not any(numbered & set(one) for one in shown["events"])
    page = await service.events(EventQuery(0, (), "ops"))
    told = [json.loads(data) for _, _, data in page.events]
    assert {(one["tenant"], one["conversation"]) for one in told} == {("ops", "c")}


async def test_a_listener_that_asks_for_much_is_told_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others' turns are placed between."""
    monkeypatch.setattr(views, "_MOST_AT_ONCE", 3)
    log = EventLog(lambda: 0.0)
    for number in range(8):
        log.add("end", f"h{number % 2}")
    pages, after = [], 0
    while after < log.newest:
        page = await listen(log, EventQuery(after, (), None, "h0" if after < 4 else None))
        pages.append([number for number, _, _ in page.events])
        after = page.newest
    assert pages == [[1, 3, 5], [6, 7, 8]]
