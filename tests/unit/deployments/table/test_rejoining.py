"""Turns whose routers are lost, and clients that send them again, at the table."""

import asyncio
import json
import random
from typing import Any

import pytest

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.direct import Alone, Ended, Rejoined
from conserve.recognition import Chain
from conserve.settings import Settings
from conserve.tenants.keyfile import Caller
from conserve.tenants.limits import Limits
from conserve.turn import TurnStats
from conserve.wire import SILENCE_S
from deployments.messages import TurnPlan
from deployments.router.request import read_request
from tests.unit.deployments.asgi import a_reader, receiver, scope_of
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
    end = dict((await service.shown()).events[-1])
    assert (end["note"], "why" in end) == ("rejoined after the connection was lost", False)
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


@pytest.mark.parametrize(
    ("observed", "beats", "rejoins"),
    [(None, False, True), ("before", False, False), ("after", False, False), (None, True, False)],
)
@in_virtual_time
async def test_an_answer_whose_end_was_lost_with_its_router_is_rejoined(
    observed: str | None, beats: bool, rejoins: bool
) -> None:
    service, done = await a_table(), TurnStats(outcome="completed")
    await service.router_beat("r")
    plan = await service.placed(await service.unplaced("c", CHAIN), chain=CHAIN)
    await service.prefilled(plan, None)
    if observed == "before":
        await service.observe(plan.turn, done)
    await told(service, plan.decoder_id, 1, Ended(plan.turn, STATS, (FIRST,), True, b"asked"))
    if observed == "after":
        await service.observe(plan.turn, done)
    asking = asyncio.ensure_future(service.begins("c", CHAIN, router="r2", digest=b"asked"))
    for _ in range(4):
        await asyncio.sleep(1.0)
        if beats:
            # It lives, and its client reads slowly.
            await service.router_beat("r")
    again = await asking
    assert (isinstance(again, TurnPlan) and again.rejoins) is rejoins
    if rejoins:
        assert (again.turn, again.decoder_id) == (plan.turn, plan.decoder_id)
        assert await service.says("conserve_rejoined_turns_total 1.0")
        await service.observe(again.turn, done)
        third = await service.begins("c", CHAIN, router="r2", digest=b"asked")
        assert not isinstance(third, TurnPlan)


@in_virtual_time
async def test_an_engine_that_is_lost_takes_its_answers_along() -> None:
    service = await a_table(decoders=2)
    plan = await alone(service)
    await service.engine_lost(plan.decoder_id, "a mishap")
    assert not service._running.alone
    assert not isinstance(await service.begins("c", CHAIN, router="r2", digest=b"asked"), TurnPlan)


# A body that each of the paths takes.
SAID = {"messages": [{"role": "user", "content": "WHAT IS IT?"}], "input": "WHO?", "max_tokens": 9}
PARTS: dict[str, list[Any]] = {
    "authorization": [None, "Bearer a", "Bearer ab", "a", ""],
    "x-api-key": [None, "Bearer a", "a", "ab", ""],
    "x-conversation-id": [None, "c", "b", "a/c", "None"],
    "tenant": [None, "a", "ab", "a/c", "c"],
    "path": [CHAT, MESSAGES, RESPONSES],
    "body": [json.dumps(SAID)],
}


def with_another_byte(body: str, rng: random.Random) -> str:
    """Change a letter or a number that is said, or add a space."""
    at = rng.choice([at for at, byte in enumerate(body) if byte in "9:, " or byte.isupper()])
    before, byte, after = body[:at], body[at], body[at + 1 :]
    return before + (byte + " " if byte in ":, " else chr(ord(byte) - 1)) + after


@in_virtual_time
async def test_a_thousand_requests_that_nearly_repeat_another_rejoin_no_answer() -> None:
    """Of another tenant, key, path or conversation; or with another byte in the body."""
    rng, media, service = random.Random(53), a_reader(Settings()), await a_table()
    turn = (await alone(service)).turn

    async def digest(asked: dict[str, Any]) -> bytes:
        headers = {name: asked[name] for name in list(PARTS)[:3] if asked[name] is not None}
        named = asked["tenant"]
        caller = None if named is None else Caller(named, False, Limits(), "salt")
        scope = scope_of(headers, path=asked["path"], **{"conserve.caller": caller})
        return (await read_request(scope, receiver(asked["body"].encode()), media)).digest

    for number in range(1000):
        asked = {name: rng.choice(values) for name, values in PARTS.items()}
        part = rng.choice(list(PARTS))
        others = [value for value in PARTS[part] if value != asked[part]]
        other = rng.choice(others or [with_another_byte(asked[part], rng)])
        service._running.alone[turn] = await digest(asked)
        near = asked | {part: other}
        assert await service._running.rejoin(await digest(near), "r2") is None, (
            number,
            asked,
            near,
        )
        assert await service._running.rejoin(await digest(asked), "r2")
