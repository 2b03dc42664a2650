"""A table that takes over from another deployment's: what clients would notice of it."""

import asyncio
import dataclasses

import msgspec
import pytest

from conserve.history import History
from conserve.holdings import Holdings
from conserve.settings import Settings
from deployments import table_client
from deployments.messages import EventQuery, TurnPlan
from deployments.table.actor import Legacy, TableActor
from deployments.table_client import TableName
from tests.unit.deployments.table.drive import STATS, Drive, engine

SETTINGS = Settings(placement="collocated", decoders={"replicas": 2})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_client, "listed", lambda beginning: [])


class Table(Drive, TableActor):
    """An actor's table, driven."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        TableActor.__init__(self, TableName.of("app", "1", settings), settings)
        self.plans = {}


class Engine:
    """A decoder, as far as a table knows it."""

    def __init__(self, name: str) -> None:
        self.info = engine(name)
        self.holdings = Holdings()

    async def register(self, table: Table) -> None:
        info = dataclasses.replace(self.info, holds=self.holdings.all())
        for history_id, incarnation in await table.register(info):
            self.holdings.drop(history_id, incarnation)


class World:
    """Two decoders, and the table that they are registered at."""

    def __init__(self) -> None:
        self.table = Table()
        self.engines = {name: Engine(name) for name in ("d1", "d2")}

    async def registered(self) -> "World":
        for one in self.engines.values():
            await one.register(self.table)
        return self

    async def begin(self, name: str, reaches: bool = True) -> TurnPlan:
        plan = await self.table.turn(name)
        if reaches:
            self.engines[plan.decoder_id].holdings.begin(plan.turn)
        return plan

    async def end(self, plan: TurnPlan) -> None:
        self.engines[plan.decoder_id].holdings.finish(plan.turn, STATS, (), True)
        await self.table.ends(plan)

    async def turn(self, name: str) -> TurnPlan:
        plan = await self.begin(name)
        await self.end(plan)
        return plan

    async def handed_over(self, settings: Settings = SETTINGS) -> None:
        packed = await self.table.hand_over()
        self.table = Table(settings)
        self.table.take_over(msgspec.msgpack.decode(packed, type=Legacy))

    def history(self, name: str) -> History:
        history = self.table._table.get(name)
        assert history is not None
        return history


async def test_conversations_go_on_where_they_were() -> None:
    world = await World().registered()
    before = {name: (await world.turn(name)).decoder_id for name in "abcd"}
    assert set(before.values()) == {"d1", "d2"}
    created_s = world.history("a").created_s
    await world.handed_over(SETTINGS.model_copy(update={"queue_timeout_s": 5.0}))
    assert len(world.table._table) == 4
    await world.registered()
    assert {name: (await world.begin(name)).decoder_id for name in "abcd"} == before
    assert (world.history("a").created_s, world.history("a").turns) == (created_s, 1)
    assert world.table._admission.queue.timeout_s == 5.0


async def test_turns_wait_for_the_engines_of_before_and_for_no_others() -> None:
    """More engines are wanted now; those that load are not waited for."""
    world = await World().registered()
    where = (await world.turn("a")).decoder_id
    more = Settings(placement="collocated", decoders={"replicas": 4})  # type: ignore[arg-type]
    await world.handed_over(more)
    beginning = asyncio.create_task(world.begin("a"))
    await asyncio.sleep(0.05)
    assert not beginning.done()
    await world.registered()
    assert (await asyncio.wait_for(beginning, 1)).decoder_id == where


async def test_a_turn_that_runs_ends_at_the_next_table() -> None:
    world = await World().registered()
    plan = await world.begin("a")
    await world.handed_over()
    await world.registered()
    assert world.history("a").running == (plan.turn.turn_id,)
    await world.end(plan)
    assert (await world.begin("a")).decoder_id == plan.decoder_id


async def test_a_turn_on_its_way_to_its_decoder_is_expected_there() -> None:
    world = await World().registered()
    plan = await world.begin("a", reaches=False)
    await world.handed_over()
    await world.registered()
    assert world.history("a").running == (plan.turn.turn_id,)
    world.engines[plan.decoder_id].holdings.begin(plan.turn)
    await world.end(plan)
    assert (await world.begin("a")).decoder_id == plan.decoder_id


async def test_a_lost_routers_turns_end_at_the_next_table() -> None:
    world = await World().registered()
    await world.begin("a", reaches=False)
    await world.handed_over()
    await world.registered()
    await world.table.router_beat("r")
    await world.table._router_lost("r")
    assert not world.table._table.reasoning


async def test_a_decoder_that_a_history_has_left_does_not_get_it_back() -> None:
    world = await World().registered()
    old = (await world.turn("a")).decoder_id
    held = world.engines[old].holdings.all()
    world.table._table.evict(old)
    world.table._table.leave(old)
    new = (await world.turn("a")).decoder_id
    assert new != old
    assert world.engines[old].holdings.all() == held
    await world.handed_over()
    # The one that is outdated comes first.
    await world.engines[old].register(world.table)
    assert world.engines[old].holdings.all() == []
    await world.engines[new].register(world.table)
    assert (await world.begin("a")).decoder_id == new


async def test_what_no_engine_holds_is_known_too() -> None:
    world = await World().registered()
    where = (await world.turn("a")).decoder_id
    await world.table.engine_lost(where, "it died")
    kept = world.engines.pop(where)
    await world.handed_over()
    await world.registered()
    shown = await world.table.conversation("a")
    assert shown is not None
    page = await world.table.events(EventQuery(0, (), None, None))
    assert [kind for _, kind, _ in page.events].count("place") == 1
    world.engines[where] = Engine(kept.info.id)
    assert (await world.begin("a")).decoder_id != where
    assert world.history("a").turns == 1


async def test_a_table_that_has_handed_over_begins_nothing() -> None:
    """Its caller asks the next one, once this one has ended."""
    world = await World().registered()
    await world.turn("a")
    await world.table.hand_over()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.begin("a"), 0.1)


def test_later_deployments_are_newer_and_other_models_have_other_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = TableName.of("app", "1764300000000000001", SETTINGS)
    second = TableName.of("app", "1764300000000000002", SETTINGS)
    monkeypatch.setattr(
        table_client, "listed",
        lambda beginning: [one for one in (second, first) if one.startswith(beginning)],
    )  # fmt: skip
    assert first.alive() == second.alive() == [first, second]
    assert first < second
    other = SETTINGS.model_copy(update={"engine": {"max_model_len": 512}})
    apart = TableName.of("app", "1764300000000000000", other)
    assert apart.alive() == []
