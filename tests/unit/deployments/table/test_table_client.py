"""How others find the table's actor, and give back turns that nobody waits for."""

import asyncio
from typing import Any

import pytest

from conserve.settings import Settings
from conserve.turn import TurnKey
from deployments import table_client
from deployments.messages import BeginTurn, CountingEngine, TurnPlan, Uncounted
from deployments.table import actor
from deployments.table.actor import TableActor
from deployments.table_client import Table, TableClient, TableName
from tests.unit.deployments.stub_table import StubTable

TURN = TurnKey("c", 1, 2)


def test_every_call_of_the_protocol_is_the_actors_own() -> None:
    calls = [name for name in vars(Table) if not name.startswith("_")]
    assert len(calls) > 20
    assert [name for name in calls if getattr(TableActor, name) is getattr(Table, name)] == []


@pytest.mark.parametrize(
    ("listed", "ended", "found"),
    [
        ([], [], "made 2"),
        (["1"], [], "made 2"),
        (["1", "2"], [], "found 2"),
        # A table may be listed for a while after its end.
        (["2"], ["2"], "made 2"),
        (["2", "3"], [], "found 3"),
        (["2", "3"], ["3"], "found 2"),
    ],
)
def test_the_newest_table_is_found_or_this_deployments_is_made(
    listed: list[str], ended: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings()
    own = TableName.of("app", "2", settings)
    names = {one: f"{own.removesuffix('2')}{one}" for one in "123"}
    there = [names[one] for one in listed]
    gone = [names[one] for one in ended]

    def get_actor(name: str, namespace: str) -> str:
        if name in gone:
            if not name.endswith("2"):
                there.remove(name)
            raise ValueError(name)
        return f"found {name[-1]}"

    def make(name: str, settings: Any) -> str:
        return f"made {name[-1]}"

    monkeypatch.setattr(table_client, "listed", lambda prefix: there)
    monkeypatch.setattr(table_client.ray, "get_actor", get_actor)
    monkeypatch.setattr(actor, "make_table", make)
    assert TableClient("app", "2", settings)._connect() == found


@pytest.mark.parametrize(
    ("answer", "given_back"),
    [
        (TurnPlan(TURN, "d", "http://d"), [("abandon", TURN)]),
        (Uncounted("c", CountingEngine("d", "http://d")), []),
    ],
)
async def test_a_turn_that_begins_as_its_call_is_cancelled_is_given_back(
    answer: Any, given_back: list[Any]
) -> None:
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    table = StubTable(begin=lambda _: answered, cancel=None, abandon=None)
    beginning = asyncio.ensure_future(table.begin(BeginTurn("r", 7, "c", None)))
    for _ in range(3):
        await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    assert table.told == [("cancel", "r", 7)]
    # The table had answered before it heard of that.
    answered.set_result(answer)
    for _ in range(3):
        await asyncio.sleep(0)
    assert table.told[1:] == given_back
