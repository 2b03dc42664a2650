"""The list of conversations, of many, while turns go on."""

import asyncio
import json
import random

import msgspec

from conserve import identity
from conserve.cache_account import Key, Spent
from conserve.clock import unix_s
from conserve.histories.parents import Parents
from conserve.history import History
from conserve.pausing import RunningTools
from deployments.table.views import cache_view, list_recent
from tests.unit.deployments.table.drive import Drive, engine


def conversations(count: int) -> list[History]:
    """With times at which they were last used that are not in order; some are the same."""
    rng = random.Random(count)
    found = [History(f"c{number}", number, 0.0, 0.0) for number in range(count)]
    for one in found:
        one.last_used_s = float(rng.randrange(count))
    return found


class Table:
    """What of a table is looked at."""

    def __init__(self, found: list[History]) -> None:
        self.found = {one.id: one for one in found}
        self.groups: dict[str, list[str]] = {}
        self.tools = RunningTools()
        self.parents = Parents(self.histories)
        for one in found:
            self.groups.setdefault(identity.conversation_of(one.id), []).append(one.id)

    def live(self) -> list[History]:
        return list(self.found.values())

    def has_several(self, history_id: str) -> bool:
        return len(self.groups[identity.conversation_of(history_id)]) > 1

    def histories(self, conversation_id: str) -> list[History]:
        return [self.found[id] for id in self.groups[conversation_id] if id in self.found]


def listed(found: list[History], limit: int) -> list[str]:
    raw = asyncio.run(list_recent(Table(found), limit, 0.0, {}))  # type: ignore[arg-type]
    return [one["id"] for one in json.loads(raw)]


def test_they_are_the_newest_in_order() -> None:
    for count, limit in [(0, 5), (1, 1), (5, 5), (5, 9), (30_000, 1), (30_000, 700)]:
        found = conversations(count)
        expected = sorted(found, key=lambda one: one.last_used_s, reverse=True)[:limit]
        assert listed(found, limit) == [one.id for one in expected]


def test_a_tenants_list_is_of_its_own() -> None:
    found = conversations(300)
    for number, one in enumerate(found):
        one.id = identity.scoped(["acme", "acme2", None][number % 3], one.id)
    raw = asyncio.run(list_recent(Table(found), 200, 0.0, {}, "acme"))  # type: ignore[arg-type]
    mine = sorted(found[::3], key=lambda one: one.last_used_s, reverse=True)
    assert [one["id"] for one in json.loads(raw)] == [identity.own_id(one.id) for one in mine]


def test_others_are_served_in_between() -> None:
    """Counted in turns of the loop: each of them does a slice, and no more."""
    found = conversations(100_000)

    async def turns(limit: int) -> int:
        listing = asyncio.create_task(list_recent(Table(found), limit, 0.0, {}))  # type: ignore[arg-type]
        turned = 0
        while not listing.done():
            await asyncio.sleep(0)
            turned += 1
        return turned

    assert asyncio.run(turns(10)) >= 100_000 // 8192
    assert asyncio.run(turns(10_000)) >= 100_000 // 8192 + 10_000 // 256


async def test_what_ends_meanwhile_is_left_out() -> None:
    found = conversations(20_000)
    table = Table(found)
    newest = max(found, key=lambda one: one.last_used_s)
    listing = asyncio.create_task(list_recent(table, 20_000, 0.0, {}))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del table.found[newest.id]
    table.found["new"] = History("new", 20_000, 0.0, 1e9)
    ids = [one["id"] for one in json.loads(await listing)]
    assert len(ids) == 19_999
    assert newest.id not in ids
    assert "new" not in ids


def a_shared_name(count: int) -> list[History]:
    """One conversation of many histories, the first used last."""
    ids = ["shared", *(identity.further("shared", number) for number in range(1, count))]
    return [History(id, at, float(at), float(count - at)) for at, id in enumerate(ids)]


def test_of_a_name_that_many_share_the_newest_histories_are_shown() -> None:
    found = a_shared_name(1000)
    raw = asyncio.run(list_recent(Table(found), 10, 1000.0, {}))  # type: ignore[arg-type]
    (shown,) = json.loads(raw)
    assert shown["histories_total"] == 1000
    assert [one["idle_s"] for one in shown["histories"]] == [float(at) for at in range(64)]


def test_one_whose_other_histories_end_meanwhile_is_listed_once() -> None:
    """It has several where it is met first, and one where it is met again."""
    found = [*conversations(8192), *a_shared_name(2)]
    found[0], found[-1] = found[-1], found[0]
    table = Table(found)

    async def scenario() -> list[str]:
        listing = asyncio.create_task(list_recent(table, 20_000, 0.0, {}))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        table.groups["shared"] = ["shared"]
        return [one["id"] for one in json.loads(await listing)]

    assert asyncio.run(scenario()).count("shared") == 1


async def test_the_service_answers_in_json() -> None:
    service = await Drive.of(engine("p", "prefiller"), engine("d"))
    for name in ("first", "second"):
        await service.turn(name, 10)
    answer = json.loads(await service.conversations(1))
    assert answer["object"] == "list"
    assert answer["total"] == 2
    (shown,) = answer["data"]
    one = msgspec.to_builtins(await service.conversation("second"))
    # One alone says why it is where it is.
    assert [event["kind"] for event in one.pop("events")] == ["place", "start"]
    # Time has passed between the two.
    for view in (shown, one, *shown["histories"], *one["histories"]):
        assert (view.pop("age_s", 0.0), view.pop("idle_s")) >= (0.0, 0.0)
    assert shown == one
    assert shown["last_used"] <= unix_s()


def test_clients_with_few_tokens_are_listed_together() -> None:
    spent = {Key("first", f"agent-{tokens}", None): Spent(1, tokens) for tokens in range(1, 31)}
    clients = cache_view(spent, 60, "model").clients
    assert (len(clients), clients["agent-30"]) == (21, {"first": 30})
    assert clients["others"] == {"first": 55}
