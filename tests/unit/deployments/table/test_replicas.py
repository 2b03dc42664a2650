"""The table's actor as engines come and go: who may leave when, and how many are wanted."""

import time
from typing import Any

import pytest

from autoscale.autoscaler import Scaling, Wanted
from conserve.clock import unix_s
from conserve.settings import load
from conserve.turn import TurnStats
from conserve.wire import NO_LACK, Lack
from deployments.messages import EngineStarting, Heard
from deployments.router.router import others_lack
from hetero.energy import EngineEnergy, GpuReading
from tests.unit.deployments.table.drive import Drive, engine


async def a_service(**settings: Any) -> Drive:
    return await Drive.of(engine("d1"), engine("d2"), engine("p1", "prefiller"), **settings)


async def test_a_decoder_stays_until_its_conversations_have_ended() -> None:
    service = await a_service()
    plan = await service.turn("c", ends=True)
    assert await service.leave(plan.decoder_id, False)
    assert (await service.turn("c", ends=True)).decoder_id == plan.decoder_id
    assert await service.leave(plan.decoder_id, False)
    assert await service.says('conserve_leaving_replicas{role="decoder"} 1.0')
    assert await service.says('conserve_replicas{role="decoder"} 1.0')
    await service.release("c")
    assert not await service.leave(plan.decoder_id, False)
    await service.left(plan.decoder_id)
    assert await service.says('conserve_leaving_replicas{role="decoder"} 0.0')
    assert await service.says("conserve_moves_total 0.0")
    assert await service.says('conserve_engines_lost_total{role="decoder"} 0.0')


async def test_what_a_replaced_decoder_has_moves_at_its_turns_end() -> None:
    """Serve replaces one of two that are wanted; another one will come for it."""
    service = await a_service()
    service._autoscaler.wanted["decoder"] = Wanted(Scaling(2))
    idle = await service.turn("idle", ends=True)
    assert (await service.turn("elsewhere", ends=True)).decoder_id != idle.decoder_id
    busy = await service.turn("busy")
    assert busy.decoder_id == idle.decoder_id
    assert await service.leave(idle.decoder_id, False)
    assert (await service.turn("idle", ends=True)).decoder_id != idle.decoder_id
    assert await service.leave(idle.decoder_id, False)
    await service.ends(busy)
    assert not await service.leave(idle.decoder_id, False)


async def test_after_the_deadline_idle_ones_move_and_a_running_turn_ends_first() -> None:
    service = await a_service()
    idle = await service.turn("idle", ends=True)
    assert (await service.turn("elsewhere", ends=True)).decoder_id != idle.decoder_id
    busy = await service.turn("busy")
    assert busy.decoder_id == idle.decoder_id
    assert await service.leave(idle.decoder_id, False)
    assert await service.leave(idle.decoder_id, True)
    moved = await service.turn("idle", ends=True)
    assert moved.decoder_id != idle.decoder_id
    assert await service.leave(idle.decoder_id, True)
    await service.ends(busy)
    assert not await service.leave(idle.decoder_id, True)
    await service.left(idle.decoder_id)
    assert (await service.turn("busy", ends=True)).decoder_id == moved.decoder_id
    assert await service.says("conserve_moves_total 2.0")


async def test_a_prefiller_stays_for_what_it_was_sent() -> None:
    service = await a_service(placement="conversation")
    plan = await service.turn("c")
    assert plan.prefiller_id == "p1"
    assert await service.leave("p1", False)
    await service.prefilled(plan, None)
    assert not await service.leave("p1", False)


async def test_when_the_application_ends_nobody_waits() -> None:
    service = await a_service()
    for name in ("a", "b"):
        await service.turn(name, ends=True)
    assert await service.leave("d1", False)
    assert not await service.leave("d2", False)
    assert not await service.leave("d1", False)


async def test_a_turn_that_runs_is_not_cut_when_the_other_decoders_die() -> None:
    service = await a_service()
    busy = await service.turn("busy")
    other = "d2" if busy.decoder_id == "d1" else "d1"
    idle = await service.turn("idle", ends=True)
    assert idle.decoder_id == other
    assert await service.leave(busy.decoder_id, False)
    await service.engine_lost(other, "it died")
    assert await service.leave(busy.decoder_id, False)
    await service.ends(busy)
    assert not await service.leave(busy.decoder_id, False)


async def test_where_no_router_is_left_nobody_waits() -> None:
    """A deployment with other settings has other routers, and another table."""
    service = await a_service()
    plan = await service.turn("c", ends=True)
    service._recovery.started_s -= 60
    await service.router_beat("r")
    assert await service.leave(plan.decoder_id, False)
    await service._router_lost("r")
    assert not await service.leave(plan.decoder_id, False)


async def test_a_new_table_is_told_who_is_leaving() -> None:
    service = await Drive.of()
    assert await service.leave("d1", False)
    assert not await service.leave("d1", True)
    await service.register(engine("d1", leaving=True))
    await service.register(engine("d2"))
    await service.register(engine("p1", "prefiller"))
    assert (await service.turn("c", ends=True)).decoder_id == "d2"


async def test_a_new_table_goes_on_from_what_was_wanted_and_waits_for_all_of_them() -> None:
    service = await Drive.of(
        engine("p1", "prefiller", wanted_replicas=1),
        engine("d1", wanted_replicas=3),
        decoders={"replicas": 1, "max_replicas": 3},
        prefillers={"replicas": 1},
    )
    assert not service._recovery.complete.is_set()
    await service.register(engine("d2", wanted_replicas=3))
    await service.register(engine("d3", wanted_replicas=3))
    assert service._recovery.complete.is_set()
    # What it says before its first look is too old for Serve to follow.
    early = await service.beat("d1")
    assert early is not None
    assert early.decided_s == 0
    # Nothing is held, so one would do; but not before the usual delays.
    await service._tidy(service._registry.last_beat_s)
    heard = await service.beat("d1")
    assert heard is not None
    assert heard.wanted_replicas == 3
    # Later on, one that comes back has no say.
    service._recovery.started_s -= 60
    service._autoscaler.wanted["decoder"].scaling = Scaling(2)
    await service.register(engine("d1", wanted_replicas=3))
    assert service._autoscaler.replicas("decoder") == 2


async def test_an_engine_that_has_left_is_in_no_metric() -> None:
    service = await a_service()
    gpu = GpuReading("GPU-1", "NVIDIA A40", 200.0, 300.0, 0.5, 40)
    await service.beat("d1", EngineEnergy(5.0, "epoch", False, (gpu,)))
    assert b'conserve_gpu_power_watts{gpu="GPU-1"' in await service.metrics()
    assert not await service.leave("d1", False)
    await service.left("d1")
    assert b'conserve_gpu_power_watts{gpu="GPU-1"' not in await service.metrics()


async def test_occupancy_makes_more_wanted_and_engines_hear_of_it() -> None:
    decoders = {"replicas": 1, "max_replicas": 3}
    service = await Drive.of(engine("d1"), engine("p1", "prefiller"), decoders=decoders)
    assert await service.beat("d1") == Heard([], 1, service._decided_s)
    await service.turn("c", 900)
    await service._tidy(service._registry.last_beat_s)
    assert await service.beat("d1") == Heard([], 2, service._decided_s)
    assert await service.beat("p1") == Heard([], 1, service._decided_s)
    assert await service.says('conserve_wanted_replicas{role="decoder"} 2.0')
    assert await service.says('conserve_needed_replicas{role="decoder",signal="occupancy"} 0.9')


async def test_first_prompts_make_more_prefillers_wanted() -> None:
    service = await Drive.of(
        engine("d1", capacity_tokens=10_000_000),
        engine("p1", "prefiller"),
        placement="conversation",
        prefillers={"replicas": 1, "max_replicas": 4},
        profile="a40-qwen3-0.6b",
        autoscaling={"window_s": 10},
    )
    for number in range(20):
        await service.turn(f"c{number}", 15_000)
    await service._tidy(service._registry.last_beat_s)
    # 0.6 s each: 1.2 prefillers for what comes, as much again to work the queue off.
    assert service._autoscaler.replicas("prefiller") == 4
    assert service._autoscaler.replicas("decoder") == 1


async def test_a_model_that_is_idle_gives_an_engine_to_one_that_lacks_it() -> None:
    """Told by a router's beats; what it holds moves at once, though it would have time."""
    scales = {"model": "embedded", "decoders": {"replicas": 1, "max_replicas": 2}, "prefillers": 0}
    settings = load({"share_gpus": True, "models": {"idle": scales, "busy": scales}})
    idle, busy = (Drive(settings.each[name]) for name in ("idle", "busy"))
    now_s = time.monotonic()
    for name in ("d1", "d2"):
        await idle.engine_starting(EngineStarting(name, "starting engines"))
        await idle.register(engine(name, wanted_replicas=2))
        await idle.ends(await idle.turn(f"on {name}", 700), TurnStats(700, 10, 0, 0))
    await busy.register(engine("b1"))
    await busy.turn("c", 900)
    for after_s in (0, 1, 31):
        busy._scale(now_s + after_s)
    assert await busy.says("conserve_lacked_gpus 1.0")
    lacks = {name: (await table.router_beat("r")).lack for name, table in
             (("idle", idle), ("busy", busy))}  # fmt: skip
    assert others_lack(lacks, "busy") == NO_LACK
    others = others_lack(lacks, "idle")
    assert others == Lack(1.0)
    # What was used lately is kept, and a turn that runs counts as used.
    assert idle._table.used_tokens(unix_s() + 60) == 0
    assert busy._table.used_tokens(unix_s() + 60) == 900
    idle._registry.start_s = 5.0
    await idle.router_beat("r", None, others)
    idle._scale(now_s + 10)
    assert idle._autoscaler.replicas("decoder") == 2
    idle._registry.start_s = 1e-9
    idle._scale(now_s + 10)
    assert idle._autoscaler.replicas("decoder") == 1
    assert not await idle.leave("d1", False)
    assert (await idle.turn("on d1", ends=True)).decoder_id == "d2"
    # A start takes from an engine's first word on.
    for word in ("starting engines", "warming up"):
        await idle.engine_starting(EngineStarting("d3", word))
        idle._registry.began_s["d3"] -= 30
    await idle.register(engine("d3"))
    assert idle._registry.start_s == pytest.approx(60, abs=5)
    # One that Serve has ended meanwhile hides no lack for ever.
    await busy.engine_starting(EngineStarting("b2", "starting engines"))
    busy._registry.start_s = 10.0
    for after_s, lacked in ((31, NO_LACK), (62, NO_LACK), (93, Lack(1.0))):
        busy._scale(now_s + after_s)
        assert (await busy.router_beat("r")).lack == lacked
    # A router that is not heard of says nothing any more.
    idle._others_told_s -= 20
    assert idle._sharing(time.monotonic()).lack == NO_LACK
