"""An engine that an operator drains."""

from conserve.history import TurnStats
from conserve.settings import Settings
from deployments.messages import BeginTurn, EngineInfo, PlaceTurn, Refusal, TurnPlan, Unplaced
from deployments.table.table import TableService

TOKENS = 100


async def a_service(decoders: int = 2) -> TableService:
    settings = Settings(decoders={"replicas": decoders}, prefillers={"replicas": 0})  # type: ignore[arg-type]
    service = TableService(settings)
    for number in range(decoders):
        id_ = f"d#{number}"
        await service.register(EngineInfo(id_, "decoder", f"http://{number}", 1, 1000, 900))
    return service


async def begun(service: TableService, conversation: str) -> TurnPlan:
    answer = await service.begin(BeginTurn("r", conversation, []))  # type: ignore[arg-type]
    if isinstance(answer, Unplaced):
        answer = await service.place(PlaceTurn("r", conversation, TOKENS))  # type: ignore[assignment]
    assert isinstance(answer, TurnPlan)
    return answer


async def ended(service: TableService, plan: TurnPlan) -> None:
    await service.advance(plan.turn, plan.decoder_id, TurnStats(TOKENS, 10, 0, 0), ())


async def test_conversations_move_between_turns_and_nothing_new_comes() -> None:
    service = await a_service()
    idle = await begun(service, "idle")
    await ended(service, idle)
    # The emptiest decoder gets the next one.
    await begun(service, "beside")
    running = await begun(service, "running")
    assert running.decoder_id == idle.decoder_id
    drained = idle.decoder_id
    assert await service.drain(drained) == 1
    assert (await begun(service, "new")).decoder_id != drained
    moved = await begun(service, "idle")
    assert moved.decoder_id != drained
    await ended(service, running)
    service._membership.move_drained()
    assert await service.drain(drained) == 0
    assert (await begun(service, "running")).decoder_id != drained
    assert next(one for one in await service.engines() if one.id == drained).leaving


async def test_an_engine_that_no_other_can_replace_is_not_drained() -> None:
    service = await a_service()
    assert await service.drain("nowhere") is None
    assert await service.drain("d#0") == 0
    refused = await service.drain("d#1")
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (409, "last_engine")
