"""How the add-on attaches: what engines are told, where it is loaded, and where it is missing."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

from conserve.direct import Notice
from conserve.settings import SettingsError, load
from conserve.wire import Role
from conserve_inside.lane.worker import LaneWorking
from conserve_inside.scheduler.commands import Pin, Release
from conserve_inside.sm_slots.lease import SLOT_ENVIRONMENT, SLOT_WORKER, said_of, told
from conserve_inside.sm_slots.worker import SlotWorker
from conserve_inside.tower.connector import OffloadedTowerCache
from deployments.app import llm_arguments
from deployments.engine.inside import Inside, inside_of
from deployments.messages import Heard
from hetero.sm_slots import SmLease
from hetero.tiers import role_tier

SLOTS = {"tiers": {"x": {"sm_slots": 7}}, "decoders.tier": "x"}


def started_with(role: Role = "decoder", gpu: bool = False, **given: Any) -> dict[str, Any]:
    settings = load(given)
    return llm_arguments(role, settings, settings.of_role(role), gpu)


def engine_of(role: Role = "decoder", gpu: bool = False, **given: Any) -> dict[str, Any]:
    engine: dict[str, Any] = started_with(role, gpu, **given)["engine_kwargs"]
    return engine


def inside(role: Role = "decoder", gpu: bool = False, **given: Any) -> Inside:
    settings = load(given)
    return inside_of(role, settings, role_tier(settings, settings.of_role(role), gpu))


# --- As the application is built ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "scheduled"),
    [
        ({}, ()),
        ({"engine_scheduler": "conversation", "placement": "conversation"}, ("decoder",)),
        ({"engine_scheduler": "conversation"}, ("decoder", "prefiller")),
    ],
)
def test_engines_that_host_conversations_schedule_by_them_where_that_is_asked_for(
    given: dict[str, Any], scheduled: tuple[str, ...]
) -> None:
    roles: tuple[Role, ...] = ("decoder", "prefiller", "encoder")
    for role in roles:
        engine = engine_of(role, encoders=1, **given)
        assert ("scheduler_cls" in engine) == (role in scheduled)
        assert ("scheduling_policy" in engine) == (role in scheduled)
        assert "worker_cls" not in engine
        if role != "encoder":
            assert engine["kv_transfer_config"]["kv_connector"] == "ResilientMPConnector"


@pytest.mark.parametrize(("gpu", "worker"), [(False, "cpu_worker"), (True, "worker")])
def test_decoders_have_a_lane_where_that_is_asked_for(gpu: bool, worker: str) -> None:
    given = {
        "engine_scheduler": "conversation_lane",
        "placement": "conversation",
        "tpot_bound_s": 0.03,
        "engine": {"additional_config": {"conserve": {"lane": {}}, "other": 1}},
    }
    decoder = engine_of(gpu=gpu, **given)
    assert decoder["worker_cls"] == f"conserve_inside.lane.{worker}.LaneWorker"
    transfer = decoder["kv_transfer_config"]
    connector = f"{transfer['kv_connector_module_path']}.{transfer['kv_connector']}"
    assert connector == "conserve_inside.lane.connector.LaneConnector"
    assert decoder["additional_config"] == {
        "conserve": {"lane": {}, "chunks": {"late_s": 0.03}},
        "other": 1,
    }
    prefiller = engine_of("prefiller", gpu, **given)
    assert "worker_cls" not in prefiller
    assert prefiller["kv_transfer_config"]["kv_connector"] == "ResilientMPConnector"


def test_an_engine_with_a_lane_is_told_the_shares_of_its_profiles_stages() -> None:
    def told(scheduler: str, **given: Any) -> Any:
        given = {"engine_scheduler": scheduler, "profile": "a6000-cogagent"} | given
        return engine_of(gpu=True, **given).get("additional_config")

    stages = {"encode": [24, 12, 4], "prefill": [30, 12, 6], "sms": 84}
    assert told("conversation_lane") == {"conserve": {"stages": stages}}
    assert told("order+retention") == {"conserve": {"mechanisms": ["order", "retention"]}}
    tighter = told("conversation_lane", tpot_bound_s=0.05)["conserve"]
    assert tighter["chunks"] == {"late_s": 0.05}
    assert tighter["stages"] == {"encode": [24, 18, 2], "prefill": [30, 18, 4], "sms": 84}
    by_hand = {"conserve": {"stages": {"encode": [8, 8, 0]}}}
    assert told("conversation_lane", engine={"additional_config": by_hand}) == by_hand
    assert told("conversation") is None
    assert told("conversation_lane", profile="h100-qwen3-8b") is None


@pytest.mark.parametrize(("gpu", "slots"), [(True, 7), (False, 7), (True, None)])
def test_only_an_engine_with_slots_on_a_gpu_has_another_worker(
    gpu: bool, slots: int | None
) -> None:
    config = started_with(gpu=gpu, **{"tiers": {"x": {"sm_slots": slots}}, "decoders.tier": "x"})
    environment = config["runtime_env"]["env_vars"]
    if gpu and slots:
        assert config["engine_kwargs"]["worker_cls"] == SLOT_WORKER
        assert environment["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] == "1"
        assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    else:
        assert "worker_cls" not in config["engine_kwargs"]
        assert not environment.keys() & SLOT_ENVIRONMENT.keys()


def test_a_lane_on_leased_sms_has_a_worker_of_both() -> None:
    decoder = engine_of(gpu=True, engine_scheduler="conversation_lane", **SLOTS)
    assert decoder["kv_transfer_config"]["kv_connector"] == "LaneConnector"
    worker = resolve_obj_by_qualname(decoder["worker_cls"])
    assert issubclass(worker, LaneWorking)
    assert issubclass(worker, SlotWorker)


# --- As an engine starts, serves and ends ---------------------------------------------------------


class Node:
    """The client of a node's actor."""

    actor_name = "the node's"
    use: Any = None
    left: tuple[str, ...] = ()

    async def leave(self, engine_id: str) -> None:
        self.left += (engine_id,)


def test_an_engine_tells_its_worker_beside_what_the_connector_needs() -> None:
    node, engine = Node(), engine_of(gpu=True, **SLOTS)
    engine["kv_transfer_config"]["kv_connector_extra_config"]["lmcache.mp.port"] = 7610
    engine |= inside(gpu=True, **SLOTS).configured(engine, "decoder#1", node)  # type: ignore[arg-type]
    transfer = SimpleNamespace(**engine["kv_transfer_config"])
    assert told(SimpleNamespace(kv_transfer_config=transfer)) == {
        "slots": 7, "engine_id": "decoder#1", "node_actor": "the node's",
    }  # fmt: skip
    assert transfer.kv_connector_extra_config["lmcache.mp.port"] == 7610
    # The node knows the engine before its worker leases SMs.
    assert node.use.engine_id == "decoder#1"
    # Engines that differ in it alone load what one of them has compiled.
    one, other = (
        KVTransferConfig(kv_connector_extra_config={"conserve.sm_slots": name}) for name in "ab"
    )
    assert one.compute_hash() == other.compute_hash()


def test_an_engine_that_sees_tells_its_worker_how_many_layers_stay() -> None:
    sees = {"ec_connector": "NodeEncoderCache", "ec_connector_module_path": "core",
            "ec_role": "ec_both", "ec_connector_extra_config": {"arena": "here"}}  # fmt: skip
    offloads, node = inside(**{"media.tower_layers": 2}), Node()
    found = offloads.configured({"ec_transfer_config": sees}, "decoder#1", node)  # type: ignore[arg-type]
    transfer = ECTransferConfig(**found["ec_transfer_config"])
    assert transfer.ec_connector_extra_config == {"arena": "here", "conserve.tower_layers": 2}
    assert transfer.ec_connector_module_path == OffloadedTowerCache.__module__
    assert transfer.ec_connector == OffloadedTowerCache.__name__
    with pytest.raises(SettingsError, match=r"^media.tower_layers: .* reads text only; unset it$"):
        offloads.configured({}, "decoder#1", node)  # type: ignore[arg-type]
    # An encoder keeps all layers of its tower.
    encoder = inside("encoder", **{"encoders": 1, "media.tower_layers": 2})
    assert encoder.configured({"ec_transfer_config": sees}, "e", node) == {}  # type: ignore[arg-type]
    assert node.use is None


class Core:
    """vLLM's client, as far as it takes commands to the scheduler."""

    def __init__(self) -> None:
        self.engine_core, self.commands = self, list[Any]()

    async def call_utility_async(self, name: str, command: Any) -> None:
        self.commands.append(command)


@pytest.mark.parametrize(
    ("scheduler", "keeps"), [("conversation", True), ("order", False), ("vllm", False)]
)
async def test_a_scheduler_hears_what_the_table_says_of_histories(
    scheduler: str, keeps: bool
) -> None:
    core, engine = Core(), inside(engine_scheduler=scheduler)
    assert await engine.started(core, lambda name: pytest.fail(name)) == ()
    engine.hear(Notice(1, given_up=(("paused", 1),)))
    engine.heard(Heard([("ended", 2)], 1, 0.0, holds=[("held", 3, 9.0)]))
    for _ in range(20):
        await asyncio.sleep(0)
    released = [one.keys for one in core.commands if isinstance(one, Release)]
    assert released == ([] if scheduler == "vllm" else [["1 paused"], ["2 ended"]])
    pinned = [one.for_s for one in core.commands if isinstance(one, Pin)]
    assert pinned == ([{"3 held": 9.0}] if keeps else [])


async def test_leased_sms_are_asked_of_workers_and_given_back() -> None:
    lease = SmLease("lease", "GPU-0", "decoder#1", range(3, 10), 7, 92)
    node, engine = Node(), inside(gpu=True, **SLOTS)
    given_back: list[str] = []

    async def call_workers(name: str) -> list[Any]:
        assert callable(getattr(SlotWorker, name))
        return [said_of(lease)]

    async def give_back(what: str, call: Awaitable[None], missed_s: float) -> None:
        given_back.append(what)
        await call

    # It may end before it has begun.
    await engine.ended(give_back)
    engine.configured(engine_of(gpu=True, **SLOTS), "decoder#1", node)  # type: ignore[arg-type]
    assert await engine.started(Core(), call_workers) == (lease,)
    await engine.ended(give_back)
    assert (given_back, node.left) == (["SM slots"], ("decoder#1",))


# --- Whether it is there --------------------------------------------------------------------------

ASKED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"like": "mars"}, ("engine_scheduler=order+retention",)),
    ({"tiers": {"a": {"sm_slots": 3}, "b": {}}}, ("tiers.a.sm_slots",)),
    (
        {"engine_scheduler": "lane", "media.tower_layers": 2},
        ("engine_scheduler=lane", "media.tower_layers"),
    ),
]


@pytest.fixture
def without_addons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conserve.addons.entry_points", lambda **_: ())


@pytest.mark.parametrize(("given", "names"), ASKED)
def test_without_it_its_settings_are_refused_in_a_sentence_each(
    given: dict[str, Any], names: tuple[str, ...], without_addons: None
) -> None:
    with pytest.raises(SettingsError) as refused:
        load(given)
    assert refused.value.problems == tuple(
        f"{name} needs the add-on conserve_inside, which is not installed here; install ConServe "
        "with it (make install, or pip install in its repository)"
        for name in names
    )


def test_other_settings_need_no_addon(without_addons: None) -> None:
    settings = load({"encoders": 1, "tiers": {"x": {}}, "decoders.tier": "x"})
    assert type(inside_of("decoder", settings, role_tier(settings, settings.decoders, True))) is (
        Inside
    )


def test_an_engine_without_its_settings_does_not_load_it() -> None:
    """Nor does one that knows its settings load vLLM where they are only validated."""
    shown = """
import sys
from conserve.settings import load
def loaded(): return [one for one in ("conserve_inside", "ray", "vllm") if one in sys.modules]
from deployments.engine.inside import inside_of
from hetero.tiers import role_tier
settings = load({"tiers": {"x": {}}, "decoders.tier": "x"})
inside_of("decoder", settings, role_tier(settings, settings.decoders, False))
from conserve.addons import addon
assert addon("another") is None
print(loaded())
load({"engine_scheduler": "conversation_lane"})
print(loaded())
"""
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['conserve_inside']"]
