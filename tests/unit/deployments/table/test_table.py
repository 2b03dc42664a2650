"""The conversation table's actor, without the actor: what routers may ask in an odd order."""

import asyncio
import dataclasses
import time
from typing import Any

import msgspec
import pytest

from conserve.history import History
from conserve.pausing import ToolReport
from conserve.pausing.tools import MOST_RUNNING
from conserve.placement import EngineLoad
from conserve.recognition import Chain, chain_of
from conserve.settings import Settings
from conserve.turn import TurnKey, TurnStats
from deployments.answers import Alive
from deployments.messages import (
    EngineStarting,
    Refusal,
    Timeouts,
)
from hetero.energy import EngineEnergy, GpuReading
from tests.unit.deployments.table.drive import Drive, engine, refusal

TOKENS = 600


PREFILLER, DECODER = engine("prefiller#1", "prefiller"), engine("decoder#1")


async def a_service(queue_limit: int = 1024, **settings: Any) -> Drive:
    """A prefiller and a decoder."""
    return await Drive.of(PREFILLER, DECODER, queue_limit=queue_limit, **settings)


async def a_full_service() -> Drive:
    service = await a_service()
    await service.turn("full", TOKENS)
    return service


async def test_health_says_what_engines_do_that_are_not_ready() -> None:
    service = Drive(Settings())
    service._recovery.complete.set()  # No engine is still to report what it has.
    await service.engine_starting(EngineStarting("prefiller#1", "starting engines"))
    await service.engine_starting(EngineStarting("decoder#1", "starting engines"))
    await service.engine_starting(EngineStarting("prefiller#1", "warming up"))
    assert await service.health() == Alive(0, 0, {"starting engines": 1, "warming up": 1})
    for one in (PREFILLER, DECODER):
        await service.register(one)
    assert await service.health() == Alive(1, 1)


async def test_a_conversation_waits_once_for_room() -> None:
    """A second turn waits for the first one to be bound, and goes where that is."""
    service = await a_full_service()
    first = await service.queued(tokens=TOKENS)
    second = await service.queued(tokens=TOKENS)
    assert b"conserve_queue_length 1.0" in await service.metrics()
    await service.release("full")
    placed = service.planned(await first)
    assert (placed.turn.history_id, placed.decoder_id) == ("c", "decoder#1")
    assert service.planned(await second).later
    # Nothing is left in the way of its next turn.
    await asyncio.wait_for(service.later(), 5)


async def test_a_slow_turn_says_why_until_a_quick_one_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = await a_full_service()
    now_s = time.time()
    monkeypatch.setattr("deployments.table.placing.unix_s", lambda: now_s)
    waiting = await service.queued(tokens=TOKENS)
    now_s += 3.0
    await service.release("full")
    plan = service.planned(await waiting)
    for prompt_tokens, found_tokens, why in (
        (TOKENS, 0, "waited 3.0 s for room"),
        (TOKENS + 20, TOKENS + 10, msgspec.UNSET),
    ):
        stats = TurnStats(prompt_tokens, 10, found_tokens, 0)
        await service.ends(plan, stats)
        shown = await service.shown()
        assert shown.last_turn.why == shown.histories[0].last_turn.why == why
        ended = [one for one in shown.events if dict(one)["kind"] == "end"]
        assert ended[-1].get("why", msgspec.UNSET) == why
        plan = await service.later()
    await service.release("c")
    assert not service._accounts.why


async def test_ttfet_is_counted_once_from_the_first_request_even_if_it_waited() -> None:
    service = await a_full_service()
    waiting = await service.queued(tokens=TOKENS, waited_s=5.0)
    await service.release("full")
    plan = service.planned(await waiting)

    async def seen(ago_s: float | None, turn: TurnKey = plan.turn) -> None:
        stats = TurnStats(outcome="completed", ttft_s=0.5, effective_ago_s=ago_s)
        await service.observe(turn, stats)

    async def ttfet_s() -> Any:
        return (await service.shown()).ttfet_s

    await seen(None)  # A tool call.
    assert await ttfet_s() is None
    # Another of that id.
    await seen(1.0, plan.turn._replace(incarnation=plan.turn.incarnation - 1))
    assert await ttfet_s() is None
    await seen(2.0)
    assert await ttfet_s() == pytest.approx(3.0, abs=0.5)
    await seen(0.0)
    assert await ttfet_s() == pytest.approx(3.0, abs=0.5)
    assert b"conserve_ttfet_seconds_count 1.0" in await service.metrics()


async def test_a_clock_that_is_set_ends_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    service = await a_full_service()
    for jump_s in (86_400.0, -2 * 86_400.0):
        now_s = time.time() + jump_s
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        await service._tidy(time.monotonic())
        shown = await service.shown("full")
        assert 0 <= shown.age_s < 3600


async def test_a_conversation_that_was_taken_over_has_no_ttfet() -> None:
    """Its first request came to a table that was lost; what is left of the time would be wrong."""
    held = History("c", 1, 0.0, 0.0, turns=3, held_tokens=10)
    service = await Drive.of(PREFILLER, dataclasses.replace(DECODER, holds=[held]))
    plan = await service.later()
    await service.observe(
        plan.turn, TurnStats(outcome="completed", latency_s=1.0, ttft_s=0.5, effective_ago_s=0.1)
    )
    assert (await service.shown()).ttfet_s is None
    assert b"conserve_ttfet_seconds_count 0.0" in await service.metrics()


async def test_a_conversation_is_told_its_share_of_the_energy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cold prefill on one GPU, the tail on another; what idles is the tiers' alone."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    service = await Drive.of(
        dataclasses.replace(PREFILLER, tier="fast", gpus=("GPU-fast",)),
        dataclasses.replace(DECODER, tier="frugal", gpus=("GPU-frugal",)),
        placement="conversation",
    )

    async def beat(prefiller_j: float, decoder_j: float) -> None:
        for role, joules in (("prefiller", prefiller_j), ("decoder", decoder_j)):
            gpu = GpuReading(f"GPU-{role}", "A40", 250.0, 300.0, 0.5, 60)
            energy = EngineEnergy(joules, "epoch", False, (gpu,))
            await service.beat(f"{role}#1", energy)

    async def told_j() -> Any:
        return (await service.shown()).energy_estimate_j

    await beat(0, 0)
    plan = await service.turn("c", 500)
    assert await told_j() is None
    now_s += 1
    await service.prefilled(plan, TurnStats(prefilled_tokens=500))
    now_s += 1
    stats = TurnStats(500, 40, 0, 384)
    await service.ends(plan, stats)
    now_s += 2
    await beat(800, 400)
    # One of four seconds on each.
    assert await told_j() == 300
    now_s += 4
    await beat(1000, 500)
    assert await told_j() == 300
    text = (await service.metrics()).decode()
    for line in (
        'energy_joules_total{phase="cold_prefill",role="prefiller",tier="fast"} 1000.0',
        'energy_joules_total{phase="tail",role="decoder",tier="frugal"} 500.0',
        'conserve_computed_tokens_total{tier="fast"} 500.0',
        'conserve_computed_tokens_total{tier="frugal"} 156.0',
        'conserve_tier_tokens_per_joule{tier="fast"} 0.5',
    ):
        assert line in text
    # They used 200 W and 100 W while turns ran.
    plan = await service.turn("other", 500)
    await service.prefilled(plan, TurnStats(prefilled_tokens=500, prefiller_s=0.5))
    await service.ends(plan, TurnStats(500, 40, 0, 500, engine_prefill_s=0.25))
    assert [one.joules for one in (await service.cache(5)).causes] == [100 + 25]
    described = {found.id: found for found in await service.engines()}
    assert described["decoder#1"].gpus == ["GPU-frugal"]
    assert described["decoder#1"].tier == "frugal"


async def test_without_gpus_nothing_is_said_of_them() -> None:
    service = await a_full_service()
    await service.beat("decoder#1")
    await service.ends(await service.turn("other"), TurnStats(100, 1, engine_prefill_s=0.25))
    assert b"gpu" not in await service.metrics()
    assert [one.joules for one in (await service.cache(5)).causes] == [None]
    assert (await service.shown("full")).energy_estimate_j is None


# --- Turns that are not bound yet ----------------------------------------------------------------


async def test_a_turn_that_is_given_up_leaves_the_line_at_once() -> None:
    """Its client left; the next turn of the same conversation waits in its own right."""
    service = await a_full_service()
    first = await service.queued(tokens=TOKENS, number=1)
    await service.cancel("r", 1)
    # Before the first call has noticed.
    second = await service.queued(tokens=TOKENS)
    assert isinstance(await first, Refusal)
    await service.release("full")
    service.planned(await asyncio.wait_for(second, 5))
    assert not service._room.pending


async def test_of_turns_that_wait_for_one_that_is_given_up_one_waits_for_room() -> None:
    service = await a_full_service()
    first = await service.queued(tokens=TOKENS, number=1)
    second, third = [await service.queued(tokens=TOKENS) for _ in range(2)]
    await service.cancel("r", 1)
    assert isinstance(await first, Refusal)
    await asyncio.sleep(0.01)
    assert await service.says("conserve_queue_length 1.0")
    await service.release("full")
    assert not service.planned(await second).later
    assert service.planned(await third).later


async def test_who_waits_too_long_is_turned_away_and_the_next_one_moves_up() -> None:
    service = await a_service(queue_timeout_s=0.05)
    await service.turn("full", TOKENS)
    large = await service.queued("large", 900)
    await asyncio.sleep(0.03)
    await service.turn("small", 300)
    refusal(await large, 429, "queue_timeout")
    assert b'conserve_queue_refusals_total{reason="timeout"} 1.0' in await service.metrics()
    assert not service._room.pending


async def test_who_finds_no_place_in_line_is_told_when_to_come_again() -> None:
    service = await a_service(queue_limit=1)
    await service.placed("full", 900)
    waits = await service.queued("waits", 900)
    refused = refusal(await service.places("late", 900), 429, "queue_full")
    assert "the queue is full (at most 1 conversations)" in refused.message
    assert refused.retry_after_s is not None
    assert 1 <= refused.retry_after_s <= 60
    await service.release("full")
    service.planned(await asyncio.wait_for(waits, 5))


async def test_the_longest_wait_changes_in_place() -> None:
    service = await a_full_service()
    await service.router_beat("r", Timeouts(queue_timeout_s=0.05, idle_timeout_s=1800.0))
    waiting = service.places(tokens=TOKENS)
    refusal(await asyncio.wait_for(waiting, 30), 429, "queue_timeout")


async def test_a_turn_that_is_given_up_and_unbound_as_it_gets_room_hurts_nobody_else() -> None:
    """All before the call that waits for room has noticed."""
    service = await a_full_service()
    waiting = await service.queued(tokens=TOKENS, number=1)
    await service.release("full")  # Room for it.
    await service.cancel("r", 1)
    await service.engine_lost("decoder#1", "as it happens")
    assert isinstance(await asyncio.wait_for(waiting, 5), Refusal)
    assert b"conserve_queue_length 0.0" in await service.metrics()
    await service.register(DECODER)
    assert not service._room.pending
    await service.turn(tokens=TOKENS)


async def test_two_turns_of_a_conversation_never_get_the_same_key() -> None:
    """The second comes after room was found for the first, and before the first has noticed."""
    service = await a_full_service()
    first = await service.queued(tokens=TOKENS, number=1)
    await service.release("full")
    await service.cancel("r", 1)
    plan = await service.placed(tokens=TOKENS)
    # The first one was given up, and is over.
    assert isinstance(await first, Refusal)
    assert (await service.shown()).phase == "reasoning"
    await service.ends(plan, TurnStats(TOKENS, 1, 0, 0))
    assert (await service.shown()).phase == "acting"


async def test_a_call_that_is_ended_as_it_gets_room_leaves_no_turn_running() -> None:
    service = await a_full_service()
    waiting = await service.queued(tokens=TOKENS)
    await service.release("full")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await service.conversation("c") is None
    assert not service._room.pending


async def test_who_gives_up_its_turn_leaves_another_turn_of_the_conversation_alone() -> None:
    service = await a_full_service()
    waiting = await service.queued(tokens=TOKENS, number=1)
    await service.cancel("r", 2)
    await service.cancel("another", 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    await service.release("full")
    service.planned(await waiting)


async def test_nothing_is_left_of_a_router_that_is_lost_while_its_turns_wait() -> None:
    """One gets room just then, the other waits for its conversation's first turn."""
    service = await a_full_service()
    await service.router_beat("lost")
    placing = await service.queued(tokens=TOKENS, router="lost")
    later = asyncio.create_task(service.begins(router="lost"))
    await asyncio.sleep(0)
    await service.release("full")
    await service._router_lost("lost")
    assert isinstance(await placing, Refusal)
    assert isinstance(await later, Refusal)
    assert await service.conversation("c") is None
    assert not service._room.pending
    assert not service._running.routers or all(key[0] == "full" for key in service._running.routers)
    # A call of it that comes late begins nothing: its client is gone.
    refusal(await service.begins("late", router="lost"), 503, "unavailable")
    # One that was only silent is served again.
    await service.router_beat("lost")
    await service.unplaced("late", router="lost")


# --- What nobody may do to others ----------------------------------------------------------------


async def test_what_fits_on_no_decoder_is_refused_instead_of_keeping_others_waiting() -> None:
    service = await a_service()
    refused = refusal(await service.places("huge", 1001), 400, "context_length_exceeded")
    assert "1001 tokens" in refused.message
    await service.turn("c", 1000)


@pytest.mark.parametrize("named", [True, False])
async def test_a_cut_first_turn_counts_only_if_the_conversation_can_go_on(named: bool) -> None:
    """Without an id of its own, and without an answer, its client cannot come back to it."""
    service = await a_service()
    asked = await service.unplaced("task-42" if named else None)
    plan = await service.placed(asked, TOKENS)
    service._running.abandon(plan.turn, "decoder#1", TurnStats(TOKENS, 5, 0, 512))
    shown = await service.conversation(asked.history_id)
    assert (shown is not None) is named
    heard = await service.beat("decoder#1")
    assert heard is not None
    assert ((asked.history_id, plan.turn.incarnation) in heard.ended) is not named


async def test_a_cut_later_turn_ends_nothing() -> None:
    service = await a_service()
    chain = Chain(b"r" * 16, None, [])
    asked = await service.unplaced(None, chain)
    first = await service.placed(asked, TOKENS, chain=chain)
    stats = TurnStats(TOKENS, 5, 0, 512)
    await service.ends(first, stats, (b"t" * 16,))
    second = await service.later(None, Chain(b"r" * 16, None, [b"t" * 16]))
    service._running.abandon(second.turn, "decoder#1", stats)
    assert await service.conversation(asked.history_id) is not None


async def test_a_turn_beside_one_that_waits_is_a_history_of_its_own() -> None:
    service = await a_service()
    begins, follows = Chain(b"r" * 16, None, [], True), Chain(b"r" * 16, None, [b"t" * 16])
    plan = await service.placed(await service.unplaced(None, begins), TOKENS, chain=begins)
    history_id = plan.turn.history_id
    await service.ends(plan, TurnStats(TOKENS, 5, 0, 0), (b"t" * 16,))
    history = service._table.get(history_id)
    assert history is not None
    assert service._table.memory is not None
    service._table.memory.pause(history, "room")
    await service.turn("full", TOKENS)
    asked = await service.unplaced(None, follows)
    assert asked.history_id == history_id
    waiting = await service.queued(asked, TOKENS, follows)
    beside = await asyncio.wait_for(service.unplaced(None, follows), 5)
    assert beside.history_id != history_id
    waiting.cancel()


async def test_a_client_that_leaves_answers_out_goes_on_with_its_history() -> None:
    service = await a_service()
    said = [{"role": "user", "content": f"{n}"} for n in range(99)]
    for count in (1, 2, 90):
        chain = chain_of(said[:count], most_ends=64)
        plan = await service.begins("c", chain)
        if count == 1:
            plan = await service.placed(plan, 90, chain=chain)
        assert plan.turn.history_id == "c"
        tails = chain_of(said[:count]).beginning.tails({"role": "assistant", "content": "hm"})
        await service.ends(plan, TurnStats(90, 5, 0, 0), tails)
    # What an earlier turn asked is asked once more, beside the history, from its first prompt on.
    again = await service.unplaced("c", chain_of(said[:2]))
    assert again.history_id != "c"
    other = await service.placed(again, 90, chain=chain_of(said[:2]))
    assert other.root == chain_of(said[:1]).root


async def test_a_history_that_makes_room_for_a_waiting_one_of_its_conversation_has_ended() -> None:
    service = await a_service(pausing=False)
    first, compacted = (Chain(root * 16, None, [], True) for root in (b"1", b"2"))
    plan = await service.placed("c", TOKENS, first)
    waiting = await service.queued(await service.unplaced("c", compacted), TOKENS, compacted)
    await service.ends(plan, TurnStats(TOKENS, 5, 0, 0), (b"t" * 16,))
    service.planned(await waiting)
    heard = await service.beat("decoder#1")
    assert heard is not None
    assert ("c", plan.turn.incarnation) in heard.ended


@pytest.mark.parametrize("bound", [True, False])
async def test_a_completion_under_a_chats_id_is_a_history_of_its_own(bound: bool) -> None:
    """Also while the chat is not bound yet, and after it has ended."""
    service = await a_service()
    chain = Chain(b"r" * 16, None, [], ends_with_root=True)
    if bound:
        chat = await service.placed("c", 10, chain)
    else:
        await service.turn("full", 900)
        waiting = await service.queued("c", 200, chain, number=1)
    completion = await asyncio.wait_for(service.unplaced("c", None), 5)
    beside = completion.history_id
    assert beside != "c"
    await service.placed(beside, 10)
    if bound:
        await service.abandon(chat.turn)
    else:
        await service.cancel("r", 1)
        assert isinstance(await waiting, Refusal)
    again = await service.later("c", None)
    assert again.turn.history_id == beside


@pytest.mark.parametrize(
    ("settings", "host_tokens", "parks"),
    [
        ({}, 0, False),
        ({}, 5000, True),
        # There prefillers read what decoders have computed.
        ({"placement": "per_turn"}, 0, True),
    ],
)
async def test_a_turn_is_told_to_park_where_there_is_host_memory(
    settings: dict[str, object], host_tokens: int, parks: bool
) -> None:
    engines = (dataclasses.replace(one, host_tokens=host_tokens) for one in (PREFILLER, DECODER))
    service = await Drive.of(*engines, **settings)
    plan = await service.turn(tokens=TOKENS)
    assert plan.parks == parks
    # What a prefiller has computed is there, whether the decoder parks or not.
    await service.prefilled(plan, TurnStats(prefilled_tokens=TOKENS))
    shown = (await service.metrics()).decode()
    if host_tokens:
        assert f"conserve_parked_tokens {TOKENS:.1f}" in shown
    else:
        assert f"conserve_parked_tokens {TOKENS:.1f}" not in shown


async def test_engines_of_one_node_share_its_host_memory() -> None:
    nodes = enumerate([("a", 500), ("a", 500), ("b", 300)])
    service = await Drive.of(*(
        engine(f"decoder#{number}", url=f"http://{node}:{8000 + number}", host_tokens=tokens)
        for number, (node, tokens) in nodes
    ))  # fmt: skip
    memory = service._table.memory
    assert memory is not None
    for name in ("x", "y"):
        memory.parked(History(name, 1, 0.0, 0.0), 600)
    assert memory.parked_tokens == 800
    # A node is lost, with all that was there.
    await service.engine_lost("decoder#2", "as it happens")
    assert memory.parked_tokens == 500


async def test_a_clients_tools_are_noted_until_its_next_turn() -> None:
    service = await a_full_service()
    assert await service.report_tool("unknown", ToolReport("bash")) is None
    plan = await service.later("full")
    stats = TurnStats(TOKENS, 10, 0, 0, "bash")
    await service.ends(plan, stats)
    assert await service.report_tool("full", ToolReport("bash", "1")) == 1
    assert await service.report_tool("full", ToolReport("bash", "2")) == 2
    assert await service.report_tool("full", ToolReport("bash", "1", ended=True)) == 1
    shown = await service.shown("full")
    assert shown.running_tools == 1
    (history,) = shown.histories
    assert history.called == "bash"
    (running,) = history.running_tools
    assert (running.tool, running.call_id) == ("bash", "2")
    assert running.running_s >= 0
    events: list[dict[str, Any]] = msgspec.to_builtins(shown.events)
    told = [one for one in events if one["kind"].startswith("tool_")]
    assert [(one["kind"], one["call_id"]) for one in told] == [
        ("tool_start", "1"), ("tool_start", "2"), ("tool_end", "1"),
    ]  # fmt: skip
    assert ["wall_s" in one for one in told] == [False, False, True]
    # No start without an end outlives the next turn, or the conversation.
    await service.later("full")
    assert (await service.shown("full")).running_tools == 0
    await service.report_tool("full", ToolReport("bash"))
    await service.release("full")
    assert len(service._table.tools) == 0


async def test_so_many_tools_of_a_history_are_noted() -> None:
    service = await a_full_service()
    for number in range(MOST_RUNNING):
        assert await service.report_tool("full", ToolReport("bash")) == number + 1
    refusal(await service.report_tool("full", ToolReport("bash")), 400, "too_many_tools")


async def test_what_kv_space_is_used_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table's clock: ten seconds of a first turn, ten idle, and ten of a second turn."""
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    async def costs(service: Drive) -> dict[str, float]:
        lines = (await service.metrics()).decode().splitlines()
        found = [one for one in lines if one.startswith("conserve_cost_token_seconds_total{")]
        return {one.split('term="')[1].split('"')[0]: float(one.split()[-1]) for one in found}

    service = await a_full_service()
    # It would take the engine, which sends no beats, for lost.
    assert service._housekeeping is not None
    service._housekeeping.cancel()
    now_s[0] += 10
    stats = TurnStats(TOKENS, 100, 0, 512, decode_s=6.0)
    await service.ends("full", stats)
    now_s[0] += 10
    plan = await service.later("full")
    now_s[0] += 10
    # Its engine had lost all but 200 of what it held, 700, and 50 tokens are new.
    again = TurnStats(750, 100, 200, 0, decode_s=5.0)
    await service.ends(plan, again)
    expected = {
        "decode": 3600 + 3500,
        "prefill": 2400 + 3500 * 50 / 550,
        "recompute": 3500 * 500 / 550,
        "unused": 4000 + 3000 + 3000,
        "caching": 7000,
    }
    # They sum differences of a clock, which round with its value.
    assert await costs(service) == pytest.approx(expected)
    assert b"conserve_recomputed_tokens_total 500.0" in await service.metrics()
    await service.engine_lost("decoder#1", "as it happens")
    assert await costs(service) == {}


async def test_handoffs_that_came_late_or_not_are_counted() -> None:
    service = await a_full_service()
    stats = TurnStats(TOKENS, 100, 0, 256, missed_tokens=256, late=True)
    await service.ends("full", stats)
    shown = (await service.metrics()).decode()
    assert "conserve_late_handoffs_total 1.0" in shown
    assert "conserve_missed_handoffs_total 1.0" in shown
    assert "conserve_missed_handoff_tokens_total 256.0" in shown


async def test_nothing_is_looked_up_in_lmcache_before_something_may_be_stored_there() -> None:
    engines = (dataclasses.replace(one, capacity_tokens=100_000) for one in (PREFILLER, DECODER))
    service = await Drive.of(*engines)
    first, second = await service.turn("a", TOKENS), await service.turn("b", TOKENS)
    assert [(one.prefiller_id, one.looks_up) for one in (first, second)] == [(None, False)] * 2
    # A prompt that is handed over is looked up, and so is all that comes after it.
    await service.beat("decoder#1", None, EngineLoad(decodes=30, step_s=0.02))
    handed_over = await service.turn("c", TOKENS)
    assert (handed_over.prefiller_id, handed_over.looks_up) == ("prefiller#1", True)
    await service.beat("decoder#1", None, EngineLoad())
    fourth = await service.turn("d", TOKENS)
    assert (fourth.prefiller_id, fourth.looks_up) == (None, True)


async def test_with_a_disk_each_turn_is_stored_and_each_first_one_looked_up() -> None:
    """And files of a conversation are removed as it ends, also of one that is not known."""
    decoder = dataclasses.replace(DECODER, host_tokens=100_000)
    service = await Drive.of(decoder, lmcache={"disk": {"path": "/kv"}})
    plan = await service.turn("a", TOKENS)
    assert (plan.looks_up, plan.parks) == (True, True)
    assert not await service.release("from before")
    heard = await service.beat("decoder#1", None, EngineLoad())
    assert heard is not None
    assert heard.forgotten == ["from before"]
    heard = await service.beat("decoder#1", None, EngineLoad())
    assert heard is not None
    assert heard.forgotten == []


async def test_an_engine_that_has_served_before_may_have_had_something_stored() -> None:
    held = History("b", 2, 0.0, 0.0, home="decoder#1")
    service = await Drive.of(PREFILLER, dataclasses.replace(DECODER, holds=[held]))
    plan = await service.turn("a", TOKENS)
    assert plan.looks_up
