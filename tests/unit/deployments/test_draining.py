"""Engines that leave: nothing new, what they have to its end, and only then the rest moved."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from ray.serve._private.common import TimeStampedValue

from autoscale.capacity.served import with_profile
from autoscale.configured import make_autoscaler
from autoscale.scaling import Scaling
from autoscale.serve import DECIDED_S, WANTED_REPLICAS, FollowTable, serve_options
from conserve.conversation import TurnStats
from conserve.conversations import ConversationTable
from conserve.placement import ConversationPlacement
from conserve.settings import Settings, SettingsError
from conserve.wire import Role
from deployments.messages import EngineInfo, Heard, TurnPlan, Unplaced
from deployments.table.table import TableService
from hetero.energy import EngineEnergy, GpuReading


def a_table() -> ConversationTable:
    table = ConversationTable(ConversationPlacement(), idle_timeout_s=60)
    for name in ("d1", "d2"):
        table.add_decoder(name, 1000)
    for name in ("p1", "p2"):
        table.add_prefiller(name)
    return table


def bind(table: ConversationTable, name: str, tokens: int = 100) -> str:
    assert table.begin(name, 0) is None
    placement = table.bind(name, tokens, 0)
    assert placement is not None
    return placement.decoder_id


def finish(table: ConversationTable, name: str) -> None:
    found = table.get(name)
    assert found is not None
    assert found.decoder_id is not None
    stats = TurnStats(100, 10, 0, 0)
    assert table.advance(found.newest_turn, found.decoder_id, stats, (), 0)


# --- The ledger -----------------------------------------------------------------------------------


def test_a_decoder_that_leaves_keeps_its_conversations_and_gets_no_new_one() -> None:
    table = a_table()
    assert bind(table, "old") == "d1"
    finish(table, "old")
    table.leave("d1")
    assert {bind(table, f"new{number}") for number in range(5)} == {"d2"}
    again = table.begin("old", 1)
    assert again is not None
    assert again.decoder_id == "d1"
    assert [one.id for one in table.accepting_decoders] == ["d2"]


def test_when_all_leave_nothing_is_placed() -> None:
    table = a_table()
    table.leave("d1")
    table.leave("d2")
    assert table.bind("c", 100, 0) is None


def test_a_prefiller_that_leaves_gets_no_prompt() -> None:
    table = a_table()
    table.leave("p1")
    for number in range(3):
        placement = table.bind(f"c{number}", 100, 0)
        assert placement is not None
        assert placement.prefiller_id == "p2"


def test_eviction_spares_a_running_turn_and_moves_the_conversation_after_it() -> None:
    table = a_table()
    assert bind(table, "idle") == "d1"
    finish(table, "idle")
    assert bind(table, "other") == "d2"
    assert bind(table, "busy") == "d2"
    finish(table, "other")
    for name in ("d1", "d2"):
        table.add_decoder(name, 1000)
    table.add_decoder("d3", 1000)
    table.leave("d2")
    assert table.evict("d2") == ["other"]
    held = table.decoders["d2"]
    assert (held.conversations, held.held_tokens) == (1, 100)
    finish(table, "busy")
    # However fast its next turn follows, it is placed anew, and counts as moved.
    assert table.begin("busy", 1) is None
    assert (held.conversations, held.held_tokens) == (0, 0)
    assert table.bind("busy", 150, 1) is not None
    moved = table.get("busy")
    assert moved is not None
    assert (moved.moves, moved.decoder_id) == (1, "d3")
    # Others are left alone.
    kept = table.begin("idle", 1)
    assert kept is not None
    assert (kept.decoder_id, kept.moves) == ("d1", 0)


def test_an_engine_of_the_same_id_starts_afresh() -> None:
    table = a_table()
    table.leave("d1")
    table.evict("d1")
    table.remove_decoder("d1")
    table.add_decoder("d1", 1000)
    table.leave("d2")
    assert bind(table, "c") == "d1"
    finish(table, "c")
    assert table.begin("c", 1) is not None


# --- The table's actor ----------------------------------------------------------------------------


def engine(name: str, role: Role = "decoder", **changes: Any) -> EngineInfo:
    return dataclasses.replace(EngineInfo(name, role, f"http://{name}", 1, 1000, 900), **changes)


async def a_service(**settings: Any) -> TableService:
    service = TableService(Settings(decoders={"replicas": 1}, **settings))
    for name in ("d1", "d2"):
        await service.register(engine(name))
    await service.register(engine("p1", "prefiller"))
    return service


async def a_turn(service: TableService, name: str, ends: bool = True) -> TurnPlan:
    plan = await service.begin("r", name, [])
    if isinstance(plan, Unplaced):
        plan = await service.place("r", name, 100)
    assert isinstance(plan, TurnPlan)
    if ends:
        await end(service, plan)
    return plan


async def end(service: TableService, plan: TurnPlan) -> None:
    stats = TurnStats(100, 10, 0, 0)
    assert await service.advance(plan.turn, plan.decoder_id, stats, ())


async def says(service: TableService, line: str) -> bool:
    return line.encode() in (await service.metrics()).splitlines()


def test_a_decoder_stays_until_its_conversations_have_ended() -> None:
    async def scenario() -> None:
        service = await a_service()
        plan = await a_turn(service, "c")
        assert await service.leave(plan.decoder_id, False)
        assert (await a_turn(service, "c")).decoder_id == plan.decoder_id
        assert await service.leave(plan.decoder_id, False)
        assert await says(service, 'conserve_leaving_replicas{role="decoder"} 1.0')
        assert await says(service, 'conserve_replicas{role="decoder"} 1.0')
        await service.release("c")
        assert not await service.leave(plan.decoder_id, False)
        await service.left(plan.decoder_id)
        assert await says(service, 'conserve_leaving_replicas{role="decoder"} 0.0')
        assert await says(service, "conserve_moves_total 0.0")
        assert b"conserve_engines_lost_total{" not in await service.metrics()

    asyncio.run(scenario())


def test_after_the_deadline_idle_ones_move_and_a_running_turn_ends_first() -> None:
    async def scenario() -> None:
        service = await a_service()
        idle = await a_turn(service, "idle")
        assert (await a_turn(service, "elsewhere")).decoder_id != idle.decoder_id
        busy = await a_turn(service, "busy", ends=False)
        assert busy.decoder_id == idle.decoder_id
        assert await service.leave(idle.decoder_id, False)
        assert await service.leave(idle.decoder_id, True)
        moved = await a_turn(service, "idle")
        assert moved.decoder_id != idle.decoder_id
        assert await service.leave(idle.decoder_id, True)
        stats = TurnStats(100, 10, 0, 0)
        assert await service.advance(busy.turn, busy.decoder_id, stats, ())
        assert not await service.leave(idle.decoder_id, True)
        await service.left(idle.decoder_id)
        assert (await a_turn(service, "busy")).decoder_id == moved.decoder_id
        assert await says(service, "conserve_moves_total 2.0")

    asyncio.run(scenario())


def test_a_prefiller_stays_for_what_it_was_sent() -> None:
    async def scenario() -> None:
        service = await a_service()
        plan = await a_turn(service, "c", ends=False)
        assert plan.prefiller_id == "p1"
        assert await service.leave("p1", False)
        await service.prefilled(plan, None)
        assert not await service.leave("p1", False)

    asyncio.run(scenario())


def test_when_the_application_ends_nobody_waits() -> None:
    async def scenario() -> None:
        service = await a_service()
        for name in ("a", "b"):
            await a_turn(service, name)
        assert await service.leave("d1", False)
        assert not await service.leave("d2", False)
        assert not await service.leave("d1", False)

    asyncio.run(scenario())


def test_a_turn_that_runs_is_not_cut_when_the_other_decoders_die() -> None:
    async def scenario() -> None:
        service = await a_service()
        busy = await a_turn(service, "busy", ends=False)
        other = "d2" if busy.decoder_id == "d1" else "d1"
        idle = await a_turn(service, "idle")
        assert idle.decoder_id == other
        assert await service.leave(busy.decoder_id, False)
        await service.engine_lost(other, "it died")
        assert await service.leave(busy.decoder_id, False)
        await end(service, busy)
        assert not await service.leave(busy.decoder_id, False)

    asyncio.run(scenario())


def test_where_no_router_is_left_nobody_waits() -> None:
    """A deployment with other settings has other routers, and another table."""

    async def scenario() -> None:
        service = await a_service()
        plan = await a_turn(service, "c")
        service._started_s -= 60
        await service.router_beat("r")
        assert await service.leave(plan.decoder_id, False)
        await service._router_lost("r")
        assert not await service.leave(plan.decoder_id, False)

    asyncio.run(scenario())


def test_a_new_table_is_told_who_is_leaving() -> None:
    async def scenario() -> None:
        service = TableService(Settings(decoders={"replicas": 1}))  # type: ignore[arg-type]
        assert await service.leave("d1", False)
        assert not await service.leave("d1", True)
        await service.register(engine("d1", leaving=True))
        await service.register(engine("d2"))
        await service.register(engine("p1", "prefiller"))
        assert (await a_turn(service, "c")).decoder_id == "d2"

    asyncio.run(scenario())


def test_a_new_table_goes_on_from_what_was_wanted_and_waits_for_all_of_them() -> None:
    async def scenario() -> None:
        service = TableService(
            Settings(decoders={"replicas": 1, "max_replicas": 3}, prefillers={"replicas": 1})  # type: ignore[arg-type]
        )
        await service.register(engine("p1", "prefiller", wanted_replicas=1))
        await service.register(engine("d1", wanted_replicas=3))
        assert not service._recovered.is_set()
        await service.register(engine("d2", wanted_replicas=3))
        await service.register(engine("d3", wanted_replicas=3))
        assert service._recovered.is_set()
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
        service._started_s -= 60
        service._autoscaler.wanted["decoder"].scaling = Scaling(2)
        await service.register(engine("d1", wanted_replicas=3))
        assert service._autoscaler.replicas("decoder") == 2

    asyncio.run(scenario())


def test_an_engine_that_has_left_is_in_no_metric() -> None:
    async def scenario() -> None:
        service = await a_service()
        gpu = GpuReading("GPU-1", "NVIDIA A40", 200.0, 300.0, 0.5, 40)
        await service.beat("d1", EngineEnergy(5.0, "epoch", False, (gpu,)))
        assert b'conserve_gpu_power_watts{gpu="GPU-1"' in await service.metrics()
        assert not await service.leave("d1", False)
        await service.left("d1")
        assert b'conserve_gpu_power_watts{gpu="GPU-1"' not in await service.metrics()

    asyncio.run(scenario())


def test_occupancy_makes_more_wanted_and_engines_hear_of_it() -> None:
    async def scenario() -> None:
        service = TableService(Settings(decoders={"replicas": 1, "max_replicas": 3}))  # type: ignore[arg-type]
        await service.register(engine("d1"))
        await service.register(engine("p1", "prefiller"))
        assert await service.beat("d1") == Heard([], 1, service._decided_s)
        assert isinstance(await service.begin("r", "c", []), Unplaced)
        assert isinstance(await service.place("r", "c", 900), TurnPlan)
        await service._tidy(service._registry.last_beat_s)
        assert await service.beat("d1") == Heard([], 2, service._decided_s)
        assert await service.beat("p1") == Heard([], 1, service._decided_s)
        assert await says(service, 'conserve_wanted_replicas{role="decoder"} 2.0')
        assert await says(
            service, 'conserve_needed_replicas{role="decoder",signal="occupancy"} 0.9'
        )

    asyncio.run(scenario())


def test_first_prompts_make_more_prefillers_wanted() -> None:
    async def scenario() -> None:
        service = TableService(
            Settings(
                decoders={"replicas": 1},  # type: ignore[arg-type]
                prefillers={"replicas": 1, "max_replicas": 4},  # type: ignore[arg-type]
                profile="a40-qwen3-0.6b",
                autoscaling={"window_s": 10},  # type: ignore[arg-type]
            )
        )
        await service.register(engine("d1", capacity_tokens=10_000_000))
        await service.register(engine("p1", "prefiller"))
        for number in range(20):
            assert isinstance(await service.begin("r", f"c{number}", []), Unplaced)
            assert isinstance(await service.place("r", f"c{number}", 15_000), TurnPlan)
        await service._tidy(service._registry.last_beat_s)
        # 0.6 s each: 1.2 prefillers for what comes, as much again to work the queue off.
        assert service._autoscaler.replicas("prefiller") == 4
        assert service._autoscaler.replicas("decoder") == 1

    asyncio.run(scenario())


# --- Serve's side ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Context:
    raw_metrics: dict[str, dict[str, list[TimeStampedValue]]] | None
    target_num_replicas: int = 2


def test_serve_follows_the_latest_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoscale.serve.time.time", lambda: 100.0)
    word = TimeStampedValue
    wanted = {"a": [word(90.0, 1.0), word(98.0, 3.0)], "b": [word(99.5, 1.0)], "c": []}
    # "b" speaks last, and says what it heard before "a" did.
    decided = {"a": [word(90.0, 89.0), word(98.0, 97.5)], "b": [word(99.5, 96.5)], "c": []}
    assert FollowTable()(Context({WANTED_REPLICAS: wanted, DECIDED_S: decided})) == (3, {})


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        {"other": {}},
        {WANTED_REPLICAS: {"a": [TimeStampedValue(99.0, 9.0)]}},
        # Said just now, of a decision long ago: the table is down, or does not reach it.
        {
            WANTED_REPLICAS: {"a": [TimeStampedValue(99.0, 9.0)]},
            DECIDED_S: {"a": [TimeStampedValue(99.0, 80.0)]},
        },
    ],
)
def test_without_a_fresh_word_serve_leaves_it_as_it_is(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoscale.serve.time.time", lambda: 100.0)
    assert FollowTable()(Context(said)) == (2, {})


def test_serve_accepts_the_options_and_finds_the_policy() -> None:
    from ray.serve.config import AutoscalingConfig

    config = AutoscalingConfig(**serve_options(1, 4))
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 1, 4)
    assert config.policy.get_policy() is FollowTable


# --- Settings -------------------------------------------------------------------------------------


def scaled(**changes: Any) -> Settings:
    return Settings(
        prefillers={"max_replicas": 2},  # type: ignore[arg-type]
        **({"model": "Qwen/Qwen3-0.6B", "profile": "a40-qwen3-0.6b"} | changes),
    )


def test_the_profile_has_to_be_of_the_served_model() -> None:
    assert with_profile(scaled()).profile == "a40-qwen3-0.6b"
    with pytest.raises(SettingsError, match=r"profile: .* of the model Qwen.*, but conserve-emb"):
        with_profile(scaled(model="embedded"))
    with pytest.raises(SettingsError, match="profile: profile nope cannot be read"):
        with_profile(scaled(profile="nope"))


def test_the_profile_has_to_be_of_the_version_that_runs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoscale.capacity.profile import load_profile

    data = json.loads(load_profile("a40-qwen3-0.6b").model_dump_json())
    data["versions"] = {"vllm": "0.1.0"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text(json.dumps(data))
    with pytest.raises(SettingsError, match=r"made with vllm 0\.1\.0, but .* runs"):
        with_profile(scaled(profile="old.json"))
    data["versions"] = {}
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert with_profile(scaled(profile="old.json")).profile == str(tmp_path / "old.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profile": None}, "prefillers scale by the profiled curve; set profile"),
        ({"placement": "full_disaggregation"}, "only with placement conversation"),
        ({"decoders": {"replicas": 3, "max_replicas": 2}}, "decoders.max_replicas: 2 is fewer"),
        ({"autoscaling": {"down_at": 0.7}}, "give down_at below target"),
    ],
)
def test_scaling_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scaled(**changes)


@pytest.mark.parametrize(
    ("tier", "slowdown"),
    [
        ({}, 1.0),
        ({"power_cap_w": 300}, 1.0),
        ({"power_cap_w": 200}, 1.14),
        ({"power_cap_fraction": 0.667}, 1.14),
        # Between two caps that are known, and below all of them: the slower.
        ({"power_cap_w": 250}, 1.14),
        ({"power_cap_w": 150}, 1.14),
    ],
)
def test_capped_prefillers_are_taken_for_slower(tier: dict[str, float], slowdown: float) -> None:
    settings = Settings(
        model="Qwen/Qwen3-0.6B",
        profile="a40-qwen3-0.6b",
        tiers={"fast": {"resource": "fast", **tier}},  # type: ignore[dict-item]
        prefillers={"max_replicas": 2, "tier": "fast"},  # type: ignore[arg-type]
    )
    load = make_autoscaler(settings)._load
    assert load is not None
    assert load._slowdown == pytest.approx(slowdown, abs=0.01)
