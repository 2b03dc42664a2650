"""The conversation table's actor, without the actor: what routers may ask in an odd order."""

import asyncio
import time

import pytest

from conserve.settings import Settings
from deployments.messages import EngineInfo, Refusal, TurnPlan, TurnTiming, Unplaced
from deployments.table import TableService

TOKENS = 600


def engine(role: str) -> EngineInfo:
    assert role in ("prefiller", "decoder")
    return EngineInfo(
        f"{role}#1", "decoder" if role == "decoder" else "prefiller", f"http://{role}", 1, 1000, 900
    )


async def a_full_service() -> TableService:
    service = TableService(Settings(decoders={"replicas": 1}))  # type: ignore[arg-type]
    for role in ("prefiller", "decoder"):
        await service.register(engine(role))
    assert isinstance(await service.begin("r", "full", []), Unplaced)
    assert isinstance(await service.place("r", "full", TOKENS), TurnPlan)
    return service


def test_a_conversation_waits_once_for_room() -> None:
    """A second turn that was told to place it, the first having seemed lost, is turned away."""

    async def scenario() -> None:
        service = await a_full_service()
        assert isinstance(await service.begin("r", "c", []), Unplaced)
        first = asyncio.create_task(service.place("r", "c", TOKENS))
        await asyncio.sleep(0)
        second = await service.place("r", "c", TOKENS)
        assert isinstance(second, Refusal)
        assert (second.status, second.code) == (429, "conversation_busy")
        assert second.retry_after_s is not None
        assert not first.done()
        await service.release("full")
        placed = await first
        assert isinstance(placed, TurnPlan)
        assert (placed.conversation_id, placed.decoder_id) == ("c", "decoder#1")
        # Nothing is left in the way of its next turn.
        assert isinstance(await asyncio.wait_for(service.begin("r", "c", []), 5), TurnPlan)

    asyncio.run(scenario())


def test_ttfet_is_counted_once_from_the_first_request_even_if_it_waited() -> None:
    async def scenario() -> None:
        service = await a_full_service()
        assert isinstance(await service.begin("r", "c", []), Unplaced)
        came_s = time.time() - 5.0
        waiting = asyncio.create_task(service.place("r", "c", TOKENS, 5.0))
        await asyncio.sleep(0)
        await service.release("full")
        plan = await waiting
        assert isinstance(plan, TurnPlan)

        async def seen(effective_at_s: float | None, incarnation: int = plan.incarnation) -> None:
            timing = TurnTiming("completed", 1.0, 0.5, (), "c", incarnation, effective_at_s)
            await service.observe(timing)

        async def ttfet_s() -> float | None:
            shown = await service.conversation("c")
            assert shown is not None
            found: float | None = shown["ttfet_s"]
            return found

        await seen(None)  # A tool call.
        assert await ttfet_s() is None
        await seen(came_s + 7.0, incarnation=plan.incarnation - 1)  # Another of that id.
        assert await ttfet_s() is None
        await seen(came_s + 8.0)
        assert await ttfet_s() == pytest.approx(8.0, abs=0.5)
        await seen(came_s + 60.0)
        assert await ttfet_s() == pytest.approx(8.0, abs=0.5)
        assert b"conserve_ttfet_seconds_count 1.0" in await service.metrics()

    asyncio.run(scenario())
