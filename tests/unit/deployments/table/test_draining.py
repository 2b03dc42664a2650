"""An engine that an operator drains."""

from tests.unit.deployments.table.drive import Drive, engine, refusal


async def a_service() -> Drive:
    decoders = (engine(f"d#{number}") for number in range(2))
    return await Drive.of(*decoders, decoders={"replicas": 2}, prefillers={"replicas": 0})


async def test_conversations_move_between_turns_and_nothing_new_comes() -> None:
    service = await a_service()
    idle = await service.turn("idle", ends=True)
    # The emptiest decoder gets the next one.
    await service.turn("beside")
    running = await service.turn("running")
    assert running.decoder_id == idle.decoder_id
    drained = idle.decoder_id
    assert await service.drain(drained) == 1
    assert (await service.turn("new")).decoder_id != drained
    moved = await service.turn("idle")
    assert moved.decoder_id != drained
    await service.ends(running)
    service._membership.move_drained()
    assert await service.drain(drained) == 0
    assert (await service.turn("running")).decoder_id != drained
    assert next(one for one in await service.engines() if one.id == drained).leaving


async def test_an_engine_that_no_other_can_replace_is_not_drained() -> None:
    service = await a_service()
    assert await service.drain("nowhere") is None
    assert await service.drain("d#0") == 0
    refusal(await service.drain("d#1"), 409, "last_engine")
