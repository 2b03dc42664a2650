"""What engines' schedulers tell is shown while their engines live."""

import msgspec

from conserve.placement.load import EngineLoad
from deployments.answers import CacheCheck
from deployments.messages import SchedulerLoad
from tests.unit.deployments.table.drive import engine
from tests.unit.deployments.table.test_hosts import a_service

LOAD = SchedulerLoad(
    waiting=[1, 0, 0, 2],
    running=[3, 0, 0, 0],
    running_kinds={"cold": 1, "resume": 0, "decode": 2},
    begun={"cold": 5, "resume": 7, "decode": 0},
    cut={"cold": 9, "resume": 1, "decode": 0},
    parts=2,
    preempted=[0, 0, 0, 4],
    reclaimed_blocks=11,
    pinned_blocks=12,
    free_blocks=13,
    blocks=40,
    tpot_s=0.02,
    tpot_bound_s=0.05,
    budget_tokens=288,
)


async def test_an_engines_slots_are_shown_where_it_has_any() -> None:
    service = await a_service("plain")
    load = EngineLoad()
    await service.beat("plain", None, load)
    assert b"conserve_engine_sm" not in await service.metrics()
    assert "sms" not in await service.shown_engine("plain")
    await service.register(engine("parted", sm_slots=7, sms=92))
    assert await service.says('conserve_engine_sm_slots{engine="parted",role="decoder"} 7.0')
    assert await service.says('conserve_engine_sms{engine="parted",role="decoder"} 92.0')
    view = await service.shown_engine("parted")
    assert (view["sm_slots"], view["sms"]) == (7, 92)
    await service.engine_lost("parted", "it died")
    assert b"conserve_engine_sm" not in await service.metrics()


async def test_what_an_engines_caches_found_is_shown() -> None:
    service = await a_service("plain")
    assert b"conserve_engine_cache_check_tokens{" not in await service.metrics()
    assert (await service.shown_engine("plain"))["cache_check"] is None
    check = CacheCheck(128, 392, 384, 0, None, 0.2, "it is not found")
    await service.register(engine("tried", cache_check=check))
    for found in ('sent"} 392.0', 'again"} 384.0', 'appended"} 0.0'):
        name = 'conserve_engine_cache_check_tokens{engine="tried",found="'
        assert await service.says(name + found)
    assert b'found="host"' not in await service.metrics()
    assert (await service.shown_engine("tried"))["cache_check"] == msgspec.to_builtins(check)


async def test_what_a_scheduler_tells_is_shown_by_level_and_kind() -> None:
    service = await a_service("d")
    await service.beat("d")
    assert b"conserve_engine_waiting" not in await service.metrics()
    await service.beat("d", None, None, LOAD)
    for line in (
        'waiting{engine="d",level="3"} 2.0',
        'running{engine="d",level="0"} 3.0',
        'running_kinds{engine="d",kind="decode"} 2.0',
        'begun_total{engine="d",kind="resume"} 7.0',
        'cut_total{engine="d",kind="cold"} 9.0',
        'preempted_total{engine="d",level="3"} 4.0',
        'parts_total{engine="d"} 2.0',
        'reclaimed_blocks_total{engine="d"} 11.0',
        'pinned_blocks{engine="d"} 12.0',
        'free_blocks{engine="d"} 13.0',
        'tpot_seconds{engine="d"} 0.02',
        'tpot_bound_seconds{engine="d"} 0.05',
        'prefill_budget_tokens{engine="d"} 288.0',
    ):
        assert await service.says(f"conserve_engine_{line}"), line
    await service.engine_lost("d", "it died")
    assert b"conserve_engine_waiting" not in await service.metrics()
