"""A table without its actor, driven as routers and engines drive it."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from conserve.recognition import Chain, Digest
from conserve.settings import Settings
from conserve.turn import TurnStats
from conserve.wire import Role
from deployments.messages import (
    BeginTurn,
    EngineInfo,
    Refusal,
    TurnPlan,
    TurnTenant,
    Uncounted,
)
from deployments.table.table import QUEUE_LIMIT, TableService

STATS = TurnStats(100, 10, 0, 0)


def engine(name: str, role: Role = "decoder", **changes: Any) -> EngineInfo:
    return replace(EngineInfo(name, role, f"http://{name}", 1, 1000, 900), **changes)


def refusal(answer: object, status: int, code: str) -> Refusal:
    """Return the refusal that an answer has to be."""
    assert isinstance(answer, Refusal), answer
    assert (answer.status, answer.code) == (status, code)
    return answer


class Drive(TableService):
    """A table whose turns are begun, placed and ended in one call each.

    Attributes:
        plans: the newest plan of each history.
        numbers: of calls, for those that are not given one.
    """

    numbers = itertools.count(1000)

    def __init__(self, settings: Settings, queue_limit: int = QUEUE_LIMIT) -> None:
        super().__init__(settings, queue_limit)
        self.plans: dict[str, TurnPlan] = {}

    @classmethod
    async def of(
        cls, *engines: EngineInfo, queue_limit: int = QUEUE_LIMIT, **settings: Any
    ) -> "Drive":
        drive = cls(Settings(**{"decoders": {"replicas": 1}, **settings}), queue_limit)
        for one in engines:
            await drive.register(one)
        return drive

    # --- turns -------------------------------------------------------------------------------

    async def begins(
        self, name: str | None = "c", chain: Chain | Sequence[Any] | None = (),
        tenant: TurnTenant | None = None, router: str = "r", **more: Any,
    ) -> Any:  # fmt: skip
        """Return what the table answers to a turn's beginning; it may wait for room."""
        number = more.pop("number", next(self.numbers))
        asked = BeginTurn(router, number, name, chain, tenant, **more)  # type: ignore[arg-type]
        return await self.begin(asked)

    async def unplaced(self, name: str | None = "c", *more: Any, **named: Any) -> Uncounted:
        """Ask for a turn whose prompt is not counted, of a history that is bound nowhere."""
        asked = await self.begins(name, *more, **named)
        assert isinstance(asked, Uncounted)
        return asked

    async def later(self, name: str | None = "c", *more: Any, **named: Any) -> TurnPlan:
        """Begin a turn of a history that is bound."""
        return self.planned(await self.begins(name, *more, **named))

    async def places(
        self, asked: Uncounted | str = "c", tokens: int = 100, chain: Chain | None = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        """Return what the table answers to a counted turn of a history; it may wait for room."""
        history_id = asked if isinstance(asked, str) else asked.history_id
        more |= {"history_id": history_id, "prompt_tokens": tokens}
        return await self.begins(None, chain, **more)

    async def placed(self, *asked: Any, **more: Any) -> TurnPlan:
        return self.planned(await self.places(*asked, **more))

    async def turn(self, name: str = "c", tokens: int = 100, ends: bool = False) -> TurnPlan:
        """Begin a turn of a history, which is bound first if need be."""
        answer = await self.begins(name)
        if isinstance(answer, Uncounted):
            answer = await self.places(answer, tokens)
        plan = self.planned(answer)
        if ends:
            await self.ends(plan)
        return plan

    async def queued(self, *asked: Any, **more: Any) -> "asyncio.Task[Any]":
        """Return the call for a place that waits for room."""
        waiting = asyncio.create_task(self.places(*asked, **more))
        for _ in range(6):
            await asyncio.sleep(0)
        assert not waiting.done()
        return waiting

    async def ends(
        self, plan: TurnPlan | str = "c", stats: TurnStats = STATS, tails: tuple[Digest, ...] = ()
    ) -> None:
        """Complete a turn, or the newest one of a history."""
        if isinstance(plan, str):
            plan = self.plans[plan]
        if plan.prefiller_id is not None:
            await self.prefilled(plan, None)
        assert self._running.advance(plan.turn, plan.decoder_id, stats, tails)

    def planned(self, answer: Any) -> TurnPlan:
        """Return the plan that an answer has to be."""
        assert isinstance(answer, TurnPlan), answer
        self.plans[answer.turn.history_id] = answer
        return answer

    # --- what it says ------------------------------------------------------------------------

    async def shown(self, name: str = "c") -> Any:
        shown = await self.conversation(name)
        assert shown is not None
        return shown

    async def shown_engine(self, name: str) -> dict[str, Any]:
        engines: list[dict[str, Any]] = msgspec.to_builtins(await self.engines())
        return next(one for one in engines if one["id"] == name)

    async def says(self, line: str) -> bool:
        """Return whether this is a line of its metrics."""
        return line.encode() in (await self.metrics()).splitlines()
