"""The table and decoders that begin turns by themselves, in virtual time."""

import asyncio
from typing import Any

import pytest

from conserve.direct import Began, Ended, Report
from conserve.recognition import Chain
from conserve.turn import TurnKey
from deployments.messages import TurnPlan
from tests.unit.deployments.table.drive import STATS, Drive, engine
from tests.unit.deployments.table.virtual_time import in_virtual_time

ROOT, FIRST, SECOND = b"r" * 16, b"1" * 16, b"2" * 16


async def a_table(decoders: int = 1) -> Drive:
    engines = (engine(f"decoder#{number + 1}", registration=1) for number in range(decoders))
    service = await Drive.of(engine("p", "prefiller"), *engines, decoders={"replicas": decoders})
    assert service._housekeeping is not None
    service._housekeeping.cancel()
    return service


async def bound(service: Drive, name: str = "c") -> TurnPlan:
    """A conversation's first turn is complete."""
    chain = Chain(ROOT, None, (), True)
    plan = await service.placed(await service.unplaced(name, chain), chain=chain)
    await service.prefilled(plan, None)
    await told(service, plan.decoder_id, 1, Ended(plan.turn, STATS, (FIRST,), True))
    return plan


async def told(service: Drive, decoder_id: str, number: int, *events: Any) -> bool | None:
    return await service.report(decoder_id, 1, Report(number, events, 0))


@in_virtual_time
async def test_what_a_decoder_begins_and_ends_counts_once() -> None:
    service = await a_table()
    plan = await bound(service)
    assert plan.direct
    turn = TurnKey("c", plan.turn.incarnation, plan.turn.turn_id + 1)
    for _ in range(2):  # Its answer was lost.
        assert await told(service, "decoder#1", 2, Began(turn, "r")) is False
    history = service._table.get("c")
    assert history is not None
    assert history.running == (turn.turn_id,)
    for _ in range(2):
        await told(service, "decoder#1", 3, Ended(turn, STATS, (SECOND,), True))
    assert (history.running, history.turns) == ((), 2)
    assert service._running.routers == {}
    text = (await service.metrics()).decode()
    assert 'conserve_later_turns_total{way="direct"} 1.0' in text
    # To what it knows nothing of it says so.
    assert await service.report("decoder#1", 2, Report(1, (), 0)) is None


@in_virtual_time
async def test_an_end_is_confirmed_when_the_decoder_has_heard() -> None:
    service = await a_table()
    plan = await bound(service)
    hearing = asyncio.ensure_future(service.hear("decoder#1", 1, 0))
    await asyncio.sleep(0.1)
    ending = asyncio.ensure_future(service.release("c"))
    notice = await hearing
    assert notice is not None
    assert notice.ended == (("c", plan.turn.incarnation),)
    await asyncio.sleep(0.1)
    assert not ending.done()
    # What was begun before is of what has ended, and is not revived.
    turn = TurnKey("c", plan.turn.incarnation, plan.turn.turn_id + 1)
    await service.report("decoder#1", 1, Report(2, (Began(turn, "r"),), notice.number))
    while not ending.done():
        notice = await service.hear("decoder#1", 1, notice.number)
        assert notice is not None
        await service.report("decoder#1", 1, Report(3, (), notice.number))
    assert await ending is True
    assert service._table.get("c") is None


@pytest.mark.parametrize("began", [True, False])
@in_virtual_time
async def test_who_moves_waits_for_the_decoder_that_it_leaves(began: bool) -> None:
    service = await a_table(decoders=2)
    plan = await bound(service)
    here = plan.decoder_id
    history = service._table.get("c")
    assert history is not None
    assert service._table.memory is not None
    service._table.memory.pause(history, "room")
    service._table.leave(here)
    asked = await service.unplaced("c", Chain(ROOT, None, (FIRST,)))
    placing = await service.queued(asked, 120)
    notice = await service.hear(here, 1, 0)
    assert notice is not None
    await asyncio.sleep(1)
    assert not placing.done()
    turn = TurnKey("c", plan.turn.incarnation, plan.turn.turn_id + 1)
    events = (Began(turn, "r"),) if began else ()
    await service.report(here, 1, Report(2, events, notice.number + 1))
    placed = service.planned(await placing)
    # A turn that runs already has it stay.
    assert (placed.decoder_id == here) is began
    assert len(history.running) == 1 + began


@in_virtual_time
async def test_a_decoder_that_is_lost_is_waited_for_no_more() -> None:
    service = await a_table()
    plan = await bound(service)
    turn = TurnKey("c", plan.turn.incarnation, plan.turn.turn_id + 1)
    await told(service, "decoder#1", 2, Began(turn, "r"))
    hearing = asyncio.ensure_future(service.hear("decoder#1", 1, 0))
    ending = asyncio.ensure_future(service.release("c"))
    await asyncio.sleep(0.1)
    await service.engine_lost("decoder#1", "a mishap")
    assert await ending is True
    await hearing
    assert await service.hear("decoder#1", 1, 0) is None
    assert service._running.routers == {}


@in_virtual_time
async def test_of_two_turns_that_wait_for_a_decoder_to_be_heard_the_second_follows() -> None:
    service = await a_table()
    await bound(service)
    history = service._table.get("c")
    assert history is not None
    assert service._table.memory is not None
    service._table.memory.pause(history, "room")
    await service.turn("full", 950)
    asked = await service.unplaced("c", Chain(ROOT, None, (FIRST,)))
    first, second = [await service.queued(asked, 120) for _ in range(2)]
    notice = await service.hear("decoder#1", 1, 0)
    assert notice is not None
    await service.report("decoder#1", 1, Report(2, (), notice.number + 1))
    await asyncio.sleep(1)
    assert not first.done()
    assert not second.done()
    await service.release("full")
    assert not service.planned(await first).later
    assert service.planned(await second).later


@in_virtual_time
async def test_a_history_gives_way_as_its_decoder_reports_the_end_of_a_turn() -> None:
    """Its tenant was served more than that of the turn that waits."""
    service = await a_table()
    plan = await bound(service, "busy\tc")
    second, third = (plan.turn._replace(turn_id=plan.turn.turn_id + n) for n in (1, 2))
    await told(service, "decoder#1", 2, Began(second, "r"))
    service._admission.queue.served("busy\tc", 20_000)
    waiting = await service.queued("waits\tc", 950)
    hearing = asyncio.ensure_future(service.hear("decoder#1", 1, 0))
    await told(service, "decoder#1", 3, Ended(second, STATS, (SECOND,), True))
    assert service.planned(await waiting).decoder_id == "decoder#1"
    notice = await hearing
    assert notice is not None
    assert notice.given_up == (("busy\tc", plan.turn.incarnation),)
    # The turn after that, which had begun before the decoder heard, is not stopped.
    await told(service, "decoder#1", 4, Began(third, "r"))
    history = service._table.get("busy\tc")
    assert history is not None
    assert (history.home, history.running) == ("decoder#1", (third.turn_id,))
