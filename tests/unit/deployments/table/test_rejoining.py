"""Turns whose routers are lost, and clients that send them again, at the table."""

import asyncio

from conserve.direct import Alone, Ended, Rejoined
from conserve.recognition import Chain
from conserve.wire import SILENCE_S
from deployments.messages import TurnPlan
from tests.unit.deployments.table.drive import STATS, Drive
from tests.unit.deployments.table.test_direct import FIRST, ROOT, a_table, told
from tests.unit.deployments.table.virtual_time import in_virtual_time

CHAIN = Chain(ROOT, None, (), True)
LATER = Chain(ROOT, None, (FIRST,))


async def alone(service: Drive, name: str | None = "c", digest: bytes = b"asked") -> TurnPlan:
    """A first turn runs, and its router is lost."""
    await service.router_beat("r")
    plan = await service.placed(await service.unplaced(name, CHAIN), chain=CHAIN)
    await service.prefilled(plan, None)
    await told(service, plan.decoder_id, 1, Alone(plan.turn, digest))
    return plan


@in_virtual_time
async def test_the_same_request_rejoins_its_answer_once() -> None:
    service = await a_table()
    plan = await alone(service)
    other = await service.begins("d", CHAIN, router="r2", digest=b"another")
    assert not isinstance(other, TurnPlan)
    again = await service.later("c", CHAIN, router="r2", digest=b"asked")
    assert again.rejoins
    assert (again.turn, again.decoder_id, again.prefiller_id) == (plan.turn, plan.decoder_id, None)
    assert service._running.routers[plan.turn] == "r2"
    history = service._table.get("c")
    assert history is not None
    assert history.running == (plan.turn.turn_id,)
    # It has a reader now: another one with the same request is a turn of its own.
    third = await service.begins("c", CHAIN, router="r3", digest=b"asked")
    assert not isinstance(third, TurnPlan)
    await told(service, plan.decoder_id, 2, Ended(plan.turn, STATS, (FIRST,), True))
    assert (history.running, history.turns) == ((), 1)
    assert not service._running.alone
    assert await service.says("conserve_rejoined_turns_total 1.0")


@in_virtual_time
async def test_a_lost_router_ends_only_what_no_decoder_has() -> None:
    service = await a_table()
    plan = await alone(service)
    waiting = await service.placed(await service.unplaced("w", CHAIN), chain=CHAIN)
    # Beats were due, and this router is suspected: it is lost long before others would be.
    await asyncio.sleep(SILENCE_S / 3)
    for router_id in service._registry.silent_routers(asyncio.get_running_loop().time()):
        await service._router_lost(router_id)
    assert [*service._running.routers] == [plan.turn]
    assert waiting.turn not in service._running.decoders
    assert (await service.later("c", CHAIN, router="r2", digest=b"asked")).rejoins


@in_virtual_time
async def test_a_router_that_beats_is_not_suspected() -> None:
    service = await a_table()
    plan = await alone(service)
    await asyncio.sleep(SILENCE_S / 3)
    await service.router_beat("r")
    assert service._registry.silent_routers(asyncio.get_running_loop().time()) == []
    await told(service, plan.decoder_id, 2, Rejoined(plan.turn, "r"))
    assert service._running.routers[plan.turn] == "r"


@in_virtual_time
async def test_a_client_that_goes_on_without_its_answer_has_its_history() -> None:
    service = await a_table()
    first = await alone(service)
    await told(service, first.decoder_id, 2, Ended(first.turn, STATS, (FIRST,), True))
    second = await service.later("c", LATER)
    await told(service, second.decoder_id, 3, Alone(second.turn, b"second"))
    # It says something else after the first answer.
    third = await service.later("c", LATER, router="r2", digest=b"third")
    assert not third.rejoins
    assert third.turn.history_id == "c"
    history = service._table.get("c")
    assert history is not None
    assert history.running == (third.turn.turn_id,)


@in_virtual_time
async def test_an_engine_that_is_lost_takes_its_answers_along() -> None:
    service = await a_table(decoders=2)
    plan = await alone(service)
    await service.engine_lost(plan.decoder_id, "a mishap")
    assert not service._running.alone
    assert not isinstance(await service.begins("c", CHAIN, router="r2", digest=b"asked"), TurnPlan)
