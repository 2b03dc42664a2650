"""Tenants in the conversation table: what is refused for a limit's sake, and what is counted."""

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from conserve import identity
from conserve.history import History
from conserve.recognition import Chain
from conserve.tenants import Limits
from conserve.turn import TurnStats
from deployments.messages import Refusal, TurnPlan, TurnTenant
from tests.unit.deployments.table.drive import Drive, engine, refusal

TAIL = b"t" * 16


async def a_service(capacity_tokens: int = 10_000, **settings: Any) -> Drive:
    engines = engine("p", "prefiller"), engine("decoder#1", capacity_tokens=capacity_tokens)
    return await Drive.of(*engines, queue_timeout_s=5, **settings)


def tenant(**limits: int) -> TurnTenant:
    return TurnTenant("acme", Limits(**limits))


async def begin(service: Drive, name: str, of: TurnTenant, tokens: int = 50) -> Any:
    return await service.begins(identity.scoped(of.name, name), (), of, prompt_tokens=tokens)


async def start(service: Drive, name: str, of: TurnTenant, tokens: int = 100) -> TurnPlan:
    return service.planned(await begin(service, name, of, tokens))


async def queue(service: Drive, name: str, of: TurnTenant, tokens: int) -> "asyncio.Task[Any]":
    return await service.queued(identity.scoped(of.name, name), tokens, tenant=of)


async def end(service: Drive, plan: TurnPlan, tokens: int = 100) -> None:
    await service.ends(plan, TurnStats(tokens, 0, 0, 0), (TAIL,))


def over(answer: object, limit: str) -> int:
    """After how many seconds to try again."""
    refused = refusal(answer, 429, "tenant_limit")
    assert limit in refused.message
    assert "acme" in refused.message
    assert refused.retry_after_s is not None
    return refused.retry_after_s


async def test_turns_count_from_their_beginning_to_their_end_however_they_wait() -> None:
    service, acme = await a_service(1000), tenant(turns=3)
    running = await start(service, "a", acme, 900)
    waiting = await queue(service, "b", acme, 900)
    behind = asyncio.create_task(begin(service, "b", acme))
    await asyncio.sleep(0)
    over(await begin(service, "c", acme), "turns")
    over(await begin(service, "a", acme), "turns")
    # Other tenants are none of it, and nothing of a refused turn is left.
    await start(service, "c", TurnTenant("umbrella", acme.limits), 50)
    await end(service, running)
    await service.release("acme\ta")
    service.planned(await waiting)
    service.planned(await behind)
    third = await start(service, "d", acme, 50)
    over(await begin(service, "e", acme), "turns")
    await service.abandon(third.turn)
    await start(service, "e", acme, 50)


async def test_a_turn_that_has_got_room_counts_once_before_it_has_noticed() -> None:
    service, acme = await a_service(1000), tenant(turns=2, conversations=2)
    first = await start(service, "a", acme, 900)
    waiting = await queue(service, "b", acme, 900)
    await end(service, first)
    await service.release("acme\ta")
    assert service._table.usage.tenant("acme").turns == 1
    assert not waiting.done()
    await start(service, "c", acme, 50)
    over(await begin(service, "d", acme), "turns")
    service.planned(await waiting)


async def test_conversations_count_while_they_are_bound_yet_and_until_they_end() -> None:
    service, acme = await a_service(1000), tenant(conversations=2)
    first = await start(service, "a", acme)
    waiting = await queue(service, "b", acme, 950)
    over(await begin(service, "c", acme), "conversations")
    # Those that are there go on.
    await start(service, "a", acme)
    await end(service, first)
    await service.release("acme\ta")
    second = service.planned(await waiting)
    await start(service, "a", acme, 10)
    over(await begin(service, "c", acme), "conversations")
    # A first turn that leaves nothing is no conversation.
    await service.abandon(second.turn)
    await start(service, "c", acme, 10)


async def test_so_many_begin_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    for module in ("placing", "room", "running", "table"):
        monkeypatch.setattr(f"deployments.table.{module}.unix_s", lambda: now_s)
    service, acme = await a_service(1000), tenant(new_per_minute=2)
    await end(service, await start(service, "a", acme))
    await service.release("acme\ta")
    now_s += 10
    plan = await start(service, "b", acme)
    assert over(await begin(service, "c", acme), "new_per_minute") == 50
    await end(service, plan)
    await start(service, "b", acme)
    now_s += 50
    # One that is not bound yet counts, and one that never will be does not.
    await service.turn("full", 700)
    waiting = await service.queued("acme\tc", 950, tenant=acme, number=1)
    over(await begin(service, "d", acme), "new_per_minute")
    await service.cancel("r", 1)
    assert isinstance(await waiting, Refusal)
    await start(service, "d", acme)


async def test_tokens_count_from_the_promise_and_in_line() -> None:
    service, acme = await a_service(1000), tenant(held_tokens=1500)
    first = await start(service, "a", acme, 900)
    waiting = await queue(service, "b", acme, 500)
    over(await begin(service, "c", acme, 200), "held_tokens")
    # More than any decoder holds, which is the first thing to say.
    refusal(await begin(service, "c", acme, 1600), 400, "context_length_exceeded")
    await end(service, first, 950)
    await service.release("acme\ta")
    service.planned(await waiting)
    assert service._table.usage.tenant("acme").held_tokens == 500
    assert not service._room.gate._pending["acme"]


async def test_who_holds_all_it_may_begins_no_turn_until_a_conversation_ends() -> None:
    service, acme = await a_service(), tenant(held_tokens=1000)
    refusal(await begin(service, "z", acme, 1001), 400, "tenant_limit")
    for name in ("a", "b"):
        await end(service, await start(service, name, acme, 400), 600)
    over(await begin(service, "a", acme), "held_tokens")
    over(await begin(service, "c", acme), "held_tokens")
    await service.release("acme\tb")
    await start(service, "a", acme)


async def test_a_table_that_is_rebuilt_counts_what_decoders_hold() -> None:
    held = [
        History("acme\ta", 1, 0.0, 0.0, turns=3, held_tokens=600, running=(7,)),
        History("acme\tb", 2, 0.0, 0.0, turns=1, held_tokens=500),
    ]
    service = await Drive.of(engine("p", "prefiller"), engine("d", holds=held))
    over(await begin(service, "b", tenant(turns=1)), "turns")
    over(await begin(service, "c", tenant(conversations=2)), "conversations")
    over(await begin(service, "b", tenant(held_tokens=1100)), "held_tokens")
    assert not service._room.pending


async def test_a_generated_id_is_the_tenants_and_listed_to_it_alone() -> None:
    service = await a_service()
    acme, umbrella = TurnTenant("acme", Limits()), TurnTenant("umbrella", Limits())
    for of in (acme, umbrella, umbrella):
        asked = await service.unplaced(None, (), of)
        assert identity.tenant_of(asked.history_id) == of.name
        await service.placed(asked, tenant=of)
    listed = json.loads(await service.conversations(10, "umbrella"))
    assert listed["total"] == len(listed["data"]) == 2
    assert {one["tenant"] for one in listed["data"]} == {"umbrella"}
    assert all(identity.is_generated(one["id"]) for one in listed["data"])
    assert "\t" not in str(listed)
    everybody = json.loads(await service.conversations(10))
    assert sorted(one["tenant"] for one in everybody["data"]) == ["acme", *["umbrella"] * 2]
    assert json.loads(await service.conversations(1, "umbrella"))["total"] == 2


async def test_metrics_tell_tenants_apart_and_nothing_of_their_conversations() -> None:
    service = await a_service()
    plan = await start(service, "secret-name", tenant(turns=1), 300)
    over(await begin(service, "b", tenant(turns=1)), "turns")
    await service.observe(plan.turn, TurnStats(outcome="completed", latency_s=1.0, tenant="acme"))
    text = (await service.metrics()).decode()
    for line in (
        'conserve_tenant_turns_total{outcome="completed",tenant="acme"} 1.0',
        'conserve_tenant_refusals_total{limit="turns",tenant="acme"} 1.0',
        'conserve_tenant_running_turns{tenant="acme"} 1.0',
        'conserve_tenant_held_tokens{tenant="acme"} 300.0',
        'conserve_tenant_conversations{tenant="acme"} 1.0',
    ):
        assert line in text
    assert "secret-name" not in text


async def test_the_fairness_of_tenants_service_is_a_metric() -> None:
    service = await a_service(1000)
    acme, umbrella = tenant(), TurnTenant("umbrella", Limits(), weight=3)
    plan = await start(service, "a", acme, 900)
    await service.ends(plan, TurnStats(890, 10, 0, 0), (TAIL,))
    assert await service.says("conserve_tenant_fairness 1.0")
    # One that waits has had nothing.
    running = await start(service, "a", acme)
    waiting = await queue(service, "b", umbrella, 900)
    assert await service.says("conserve_tenant_fairness 0.5")
    await end(service, running, 0)
    await service.release("acme\ta")
    # Three times as much as the other, as its weight is.
    plan = service.planned(await waiting)
    await service.ends(plan, TurnStats(2690, 10, 0, 0), (TAIL,))
    (found,) = re.findall(rb"\nconserve_tenant_fairness (\S+)", await service.metrics())
    assert float(found) > 0.999


async def test_without_keys_metrics_say_nothing_of_tenants() -> None:
    service = await a_service()
    await service.turn("c")
    text = (await service.metrics()).decode()
    assert set(re.findall(r'tenant="(.*?)"', text)) == {""}
    assert "conserve_tenant" not in text
    shown = msgspec.to_builtins(await service.conversation("c"))
    assert "tenant" not in shown


FORK = Chain(b"r" * 16, None, [TAIL])


async def a_history(service: Drive, name: str, of: TurnTenant, tokens: int) -> TurnPlan:
    """One whose first turn is over."""
    chain = Chain(b"r" * 16, None, [], ends_with_root=True)
    asked = await service.unplaced(identity.scoped(of.name, name), chain, of)
    plan = await service.placed(asked, tokens, tenant=of, chain=chain)
    await end(service, plan, tokens)
    return plan


async def test_one_name_is_no_way_around_a_limit() -> None:
    """Turns that continue nothing are histories of their own, whatever they are called."""
    service, acme = await a_service(), tenant(conversations=2)
    await a_history(service, "a", acme, 100)
    other = Chain(b"s" * 16, None, [], ends_with_root=True)
    second = await service.unplaced("acme\ta", other, acme)
    await service.placed(second, tenant=acme)
    third = Chain(b"u" * 16, None, [], ends_with_root=True)
    over(await service.begins("acme\ta", third, acme), "conversations")
    # What goes on with one is none that is new.
    await service.later("acme\ta", FORK, acme)


async def test_what_is_held_already_is_not_asked_for_again() -> None:
    service, acme = await a_service(), tenant(held_tokens=1500)
    await a_history(service, "a", acme, 1000)
    await service.later("acme\ta", FORK, acme)
    fork = await service.unplaced("acme\ta", FORK, acme)
    placed = await service.placed(fork, 1200, tenant=acme, chain=FORK)
    assert placed.prefiller_id is None


async def test_a_decoder_is_told_of_what_made_room() -> None:
    service, acme = await a_service(1000, pausing=False), tenant()
    left = await a_history(service, "a", acme, 900)
    compacted = Chain(b"s" * 16, None, [], ends_with_root=True)
    asked = await service.unplaced("acme\ta", compacted, acme)
    await service.placed(asked, 500, tenant=acme, chain=compacted)
    heard = await service.beat("decoder#1")
    assert heard is not None
    assert heard.ended == [("acme\ta", left.turn.incarnation)]
    assert b'conserve_conversations_ended_total{reason="displaced"} 1.0' in (
        await service.metrics()
    )
