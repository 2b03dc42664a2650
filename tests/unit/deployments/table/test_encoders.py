"""Encoders in the table: known and shown, and never where a conversation is, or a prompt."""

from typing import Any

import pytest

from conserve.encoders import Encoder
from conserve.placement.load import EngineLoad
from deployments.answers import Alive
from deployments.messages import EngineInfo
from deployments.table import membership
from hetero.energy import EngineEnergy
from tests.unit.deployments.table.drive import Drive, engine, refusal


def encoder(name: str = "e", **changes: Any) -> EngineInfo:
    return engine(name, "encoder", capacity_tokens=0, **changes)


async def a_service(*engines: EngineInfo) -> Drive:
    return await Drive.of(*engines, encoders=1)


async def test_routers_hear_of_them_as_long_as_they_live() -> None:
    service = await a_service(engine("d"), encoder())
    assert (await service.router_beat("r")).encoders == [Encoder("e", "http://e")]
    await service.engine_lost("e", "it died")
    assert (await service.router_beat("r")).encoders == []
    assert await service.says('conserve_engines_lost_total{role="encoder"} 1.0')
    assert await service.beat("e") is None
    await service.register(encoder("e2"))
    assert (await service.router_beat("r")).encoders == [Encoder("e2", "http://e2")]


async def test_routers_hear_whether_turns_can_be_served() -> None:
    service = await a_service()
    # Engines of a predecessor may still register.
    assert (await service.router_beat("r")).can_serve is None
    await service.register(engine("d"))
    assert (await service.router_beat("r")).can_serve is True
    service._recovery.complete.set()
    await service.engine_lost("d", "it died")
    # Encoders alone serve no turns.
    await service.register(encoder())
    assert (await service.router_beat("r")).can_serve is False


async def test_no_conversation_and_no_prompt_is_put_on_one() -> None:
    service = await a_service(encoder())
    service._recovery.complete.set()
    refusal(await service.begins(), 503, "unavailable")
    await service.register(engine("d"))
    for name in "abc":
        begun = await service.unplaced(name)
        assert begun.counter.id == "d"
        plan = await service.placed(begun)
        assert (plan.decoder_id, plan.prefiller_id) == ("d", None)


async def test_they_are_shown_and_counted() -> None:
    service = await a_service(engine("p", "prefiller"), engine("d"), encoder())
    health = await service.health()
    assert health == Alive(1, 1, encoders=1)
    view = await service.shown_engine("e")
    assert (view["role"], view["hosts"], view["held_tokens"]) == ("encoder", False, None)
    await service.beat("e", EngineEnergy(10, "x"), EngineLoad(5, 0, 0.0, 0.0))
    heard = await service.beat("e", EngineEnergy(30, "x"))
    assert heard is not None
    assert heard.wanted_replicas == 1
    service._scale(1000.0)
    assert await service.says('conserve_replicas{role="encoder"} 1.0')
    assert await service.says('conserve_wanted_replicas{role="encoder"} 1.0')
    without = await Drive.of()
    without._recovery.complete.set()
    assert await without.health() == Alive(0, 0)


async def test_host_memory_is_what_the_others_of_its_node_say() -> None:
    service = await a_service(engine("d", host_tokens=500), encoder(url="http://d"))
    memory = service._table.memory
    assert memory is not None
    assert memory.keeps
    # There is room for 500 tokens, not for none.


async def test_a_new_table_does_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RECOVERY_S", 1e6)
    service = await a_service(engine("p", "prefiller"))
    assert not service._recovery.is_over
    await service.register(engine("d"))
    assert service._recovery.is_over
