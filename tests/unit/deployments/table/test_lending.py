"""Turns that wait until another prompt's prefill has brought their beginning to host memory."""

import asyncio
import dataclasses
from typing import Any

import pytest

from conserve.direct import Ended, Stored
from conserve.placement import EngineLoad
from conserve.recognition import Chain
from deployments.messages import TurnPlan
from tests.unit.deployments.table.drive import STATS, Drive, engine
from tests.unit.deployments.table.test_direct import told
from tests.unit.deployments.table.virtual_time import in_virtual_time

SYSTEM_TOKENS = 2_000
DECODER = engine("d", capacity_tokens=20_000, host_tokens=100_000, registration=1)


def chain(name: str) -> Chain:
    return Chain(name.encode().ljust(16), b"s" * 16, (), True)


async def a_table(decoders: int = 2) -> Drive:
    engines = [dataclasses.replace(DECODER, id=f"d{number + 1}") for number in range(decoders)]
    service = await Drive.of(*engines, placement="elastic", decoders={"replicas": decoders})
    assert service._housekeeping is not None
    service._housekeeping.cancel()
    return service


def sibling(service: Drive, name: str, **more: Any) -> "asyncio.Task[Any]":
    asked = service.places(
        name, SYSTEM_TOKENS + 100, chain(name), system_tokens=SYSTEM_TOKENS, **more
    )
    return asyncio.create_task(asked)


async def first_and_waiting(service: Drive) -> "tuple[TurnPlan, asyncio.Task[Any]]":
    first: TurnPlan = await sibling(service, "first")
    assert first.parks
    # The others are idle.
    await service.beat(first.decoder_id, load=EngineLoad(2_000, decodes=100, step_s=0.05))
    second = sibling(service, "second")
    await asyncio.sleep(0.05)
    assert not second.done()
    return first, second


@in_virtual_time
async def test_it_goes_on_as_soon_as_its_beginning_is_stored() -> None:
    service = await a_table()
    first, second = await first_and_waiting(service)
    await told(service, first.decoder_id, 1, Stored(first.turn, SYSTEM_TOKENS + 100))
    plan = await asyncio.wait_for(second, 0.1)
    assert plan.decoder_id != first.decoder_id
    assert (plan.looks_up, plan.parks) == (True, False)
    record = service._table.record(plan.turn.turn_id)
    assert record is not None
    assert record.beginning_s >= 0.05
    assert not service._running._waiting


@in_virtual_time
@pytest.mark.parametrize("how", ["ends", "fails", "engine"])
async def test_it_goes_on_if_nothing_comes_any_more(how: str) -> None:
    service = await a_table(decoders=3)
    first, second = await first_and_waiting(service)
    if how == "engine":
        await service.engine_lost(first.decoder_id, "killed")
    else:
        ended = Ended(first.turn, STATS if how == "ends" else None, (), how == "ends")
        await told(service, first.decoder_id, 1, ended)
    plan = await asyncio.wait_for(second, 0.1)
    assert isinstance(plan, TurnPlan)
    assert not service._running._waiting


@in_virtual_time
async def test_it_waits_for_no_longer_than_a_few_times_what_the_prefill_takes() -> None:
    service = await a_table()
    _, second = await first_and_waiting(service)
    assert isinstance(await asyncio.wait_for(second, 5), TurnPlan)


@in_virtual_time
async def test_one_whose_client_leaves_leaves_nothing_behind() -> None:
    service = await a_table()
    first, second = await first_and_waiting(service)
    third = sibling(service, "third", number=7)
    await asyncio.sleep(0.05)
    for waiting in (second, third):
        waiting.cancel()
    await service.router_beat("r")
    await asyncio.gather(second, third, return_exceptions=True)
    assert service._table.get("second") is None
    assert service._table.decoders["d2"].held_tokens == 0
    assert service._running.routers.keys() == {first.turn}


@in_virtual_time
async def test_one_whose_own_engine_is_lost_is_placed_anew() -> None:
    service = await a_table(decoders=3)
    first, second = await first_and_waiting(service)
    history = service._table.get("second")
    assert history is not None
    lost = history.home
    assert lost is not None
    assert lost != first.decoder_id
    await service.engine_lost(lost, "killed")
    await told(service, first.decoder_id, 1, Stored(first.turn, SYSTEM_TOKENS + 100))
    plan = await asyncio.wait_for(second, 5)
    assert plan.decoder_id not in (lost, None)
