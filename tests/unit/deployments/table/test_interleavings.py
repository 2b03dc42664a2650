"""Clients, routers and engines that come, leave and die at any moment: the table's accounts hold.

Seeded, in virtual time: what would take hours of luck on engines takes seconds here.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from conserve import identity
from conserve.pausing import ToolReport
from conserve.settings import Settings
from conserve.tenants import Limits
from conserve.turn import TurnKey, TurnStats
from conserve.wire import Role
from deployments.messages import (
    BeginTurn,
    EngineInfo,
    Refusal,
    TurnPlan,
    TurnTenant,
    Uncounted,
)
from deployments.table.table import TableService
from tests.unit.deployments.table.virtual_time import run

SEEDS = 400
CLIENTS, MISHAPS = 12, 6
# Several turns of one conversation, through two routers, are the rule here.
CONVERSATIONS = ("one\ta", "one\tb", "two\ta")
ROUTERS = ("r1", "r2")


def an_engine(role: Role, number: int, capacity_tokens: int = 1000) -> EngineInfo:
    name = f"{role}#{number}"
    return EngineInfo(name, role, f"http://{name}", number, capacity_tokens, 900)


@dataclass
class World:
    """One table, and what everybody else knows.

    Attributes:
        close: everything happens within half a second, most of it at the same moments.
        decoders: numbers of those that live.
        gone: routers whose processes have died; what they had begun goes no further.
        limits: of either tenant.
    """

    seed: int
    close: bool
    service: TableService
    decoders: set[int] = field(default_factory=lambda: {1})
    made: int = 1
    planned: list[TurnKey] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    limits: Limits = field(default_factory=Limits)

    def tenant(self, history_id: str) -> TurnTenant:
        return TurnTenant(str(identity.tenant_of(history_id)), self.limits)

    def within_limits(self) -> None:
        """No tenant has more than it may, nor ever counts as having less than nothing."""
        for usage in self.service._table.usage.tenants().values():
            assert 0 <= usage.turns <= (self.limits.turns or 99)
            assert 0 <= usage.conversations <= (self.limits.conversations or 99)
            assert usage.held_tokens >= 0

    async def when_it_is_time(self, draw: random.Random) -> None:
        at_s = draw.random() * (0.5 if self.close else 40)
        await asyncio.sleep(round(at_s * 4) / 4 if self.close else at_s)
        for _ in range(draw.randrange(5)):
            await asyncio.sleep(0)

    async def client(self, number: int) -> None:
        """One turn, which its client may give up at any point."""
        draw = random.Random(f"{self.seed} client {number}")
        conversation, router = draw.choice(CONVERSATIONS), draw.choice(ROUTERS)
        tokens = draw.choice([300, 600, 900])
        await self.when_it_is_time(draw)
        if router in self.gone:
            return
        tenant = self.tenant(conversation)
        answer = await self._begun(BeginTurn(router, number, conversation, None, tenant), draw)
        if isinstance(answer, Uncounted):
            await asyncio.sleep(draw.choice([0, 0, 0, 1, 3, 40, 60]))
            if router in self.gone:
                return
            counted = BeginTurn(
                router, number, None, None, tenant, answer.history_id,
                waited_s=draw.random(), prompt_tokens=tokens,
            )  # fmt: skip
            answer = await self._begun(counted, draw)
        if isinstance(answer, Refusal) and answer.code == "tenant_limit":
            assert answer.retry_after_s or answer.status == 400
        if not isinstance(answer, TurnPlan) or router in self.gone:
            return
        self.planned.append(answer.turn)
        self.within_limits()
        await asyncio.sleep(draw.choice([0, 1, 5]))
        if answer.prefiller_id is not None:
            # A router says so whatever became of it.
            done = TurnStats(prefilled_tokens=tokens) if draw.random() < 0.8 else None
            await self.service.prefilled(answer, done)
        if draw.random() < 0.7:
            stats = TurnStats(tokens, 10, 0, 0)
            self.service._running.advance(answer.turn, answer.decoder_id, stats, ())
        else:
            await self.service.abandon(answer.turn)
        if draw.random() < 0.5:
            await asyncio.sleep(draw.choice([0, 1]))
            await self.service.release(conversation)
        elif draw.random() < 0.5:
            report = ToolReport("bash", draw.choice([None, "1"]), draw.random() < 0.3)
            await self.service.report_tool(conversation, report)

    async def _begun(self, asked: BeginTurn, draw: random.Random) -> Any:
        """Return the table's answer; None to a client that has left meanwhile."""
        beginning = asyncio.ensure_future(self.service.begin(asked))
        leaves = draw.random() < 0.2
        if leaves:
            await asyncio.sleep(draw.choice([0, 0, draw.random() * 4]))
            for _ in range(draw.randrange(5)):
                await asyncio.sleep(0)
            if asked.router_id not in self.gone:
                await self.service.cancel(asked.router_id, asked.number)
        answer = await beginning
        if not leaves:
            return answer
        if isinstance(answer, TurnPlan) and asked.router_id not in self.gone:
            # As a router does with the answer to a call that nobody waits for any more.
            await self.service.abandon(answer.turn)
        return None

    async def mishap(self, number: int) -> None:
        draw = random.Random(f"{self.seed} mishap {number}")
        await self.when_it_is_time(draw)
        what = draw.choice(["decoder lost", "decoder leaves", "router lost", "released", "tidied"])
        if what == "router lost":
            router = draw.choice(ROUTERS)
            if router in self.gone:
                return
            await self.service.router_beat(router)
            if draw.random() < 0.7:
                self.gone.add(router)
                await asyncio.sleep(draw.choice([0, 0, 1]))
            await self.service._router_lost(router)
            if router not in self.gone:
                # It was only silent.
                await self.service.router_beat(router)
        elif what == "released":
            await self.service.release(draw.choice(CONVERSATIONS))
        elif what == "tidied":
            await self.service._tidy(asyncio.get_running_loop().time())
        elif self.decoders:
            gone = draw.choice(sorted(self.decoders))
            if what == "decoder lost":
                self.decoders.discard(gone)
                await self.service.engine_lost(f"decoder#{gone}", "a mishap")
            else:
                await self.service.router_beat("another")
                await self.service.leave(f"decoder#{gone}", draw.random() < 0.5)
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            self.made += 1
            self.decoders.add(self.made)
            capacity = draw.choice([900, 1000, 2000])
            await self.service.register(an_engine("decoder", self.made, capacity))


async def _everything_at_once(seed: int, close: bool) -> None:
    draw = random.Random(f"{seed} settings")
    queue_limit = draw.choice([1, 2, 4])
    chosen: dict[str, Any] = {
        "decoders": {"replicas": 1},
        "queue_timeout_s": 5,
        "idle_timeout_s": 300,
    }
    service = TableService(Settings(**chosen), queue_limit)
    # Its own rounds would never end.
    service._ensure_housekeeping = lambda: None  # type: ignore[method-assign]
    await service.register(an_engine("prefiller", 1))
    await service.register(an_engine("decoder", 1))
    limits = Limits(
        turns=draw.choice([None, 1, 2, 5]),
        held_tokens=draw.choice([None, None, 700, 1500]),
        conversations=draw.choice([None, None, 1]),
        new_per_minute=draw.choice([None, None, 2]),
    )
    world = World(seed, close, service, limits=limits)
    clients = [world.client(number) for number in range(CLIENTS)]
    mishaps = [world.mishap(number) for number in range(MISHAPS)]
    # No call may fail, whatever the others do; and all come to an end.
    await asyncio.wait_for(asyncio.gather(*clients, *mishaps), 600)

    assert len(set(world.planned)) == len(world.planned), "two turns have one key"
    # Those that live yet leave nothing unsaid; of the others the table has known for long.
    for router in sorted(set(ROUTERS) - world.gone):
        await service.router_beat(router)
        await service._router_lost(router)
    assert len(service._admission.queue) == 0
    assert not service._room.pending
    assert not service._running.routers
    world.within_limits()
    gate = service._room.gate
    assert not any(gate._arriving.values())
    assert not any(gate._pending.values())
    live = service._table.live()
    assert [one.id for one in live if one.running] == []
    assert set(service._table.tools._reported) <= {one.id for one in live}
    # Costs have an end of every turn, and of every decoder.
    costs = service._accounts.costs
    assert not costs._turns
    assert set(costs.decoders) == set(service._table.decoders)
    for name, usage in service._table.usage.tenants().items():
        of_it = [one for one in live if identity.tenant_of(one.id) == name]
        assert (usage.turns, usage.conversations) == (0, len(of_it))
        assert usage.held_tokens == sum(one.held_tokens for one in of_it)
    for decoder in service._table.decoders.values():
        mine = [one for one in live if one.home == decoder.id]
        assert decoder.held_tokens == sum(one.held_tokens for one in mine)
        assert decoder.conversations == len(mine)
    assert all(one.queued_tokens == 0 for one in service._table.prefillers.values())


@pytest.mark.parametrize("close", [True, False])
def test_whatever_meets_whatever_nothing_fails_and_nothing_is_left(close: bool) -> None:
    for seed in range(SEEDS):
        try:
            run(_everything_at_once(seed, close))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
