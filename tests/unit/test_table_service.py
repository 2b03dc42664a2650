"""The conversation table's actor, without the actor: what routers may ask in an odd order."""

import asyncio

from conserve.settings import Settings
from deployments.messages import EngineInfo, Refusal, TurnPlan, Unplaced
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
