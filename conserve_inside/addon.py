"""Attaches to an application's engines, by the seat `deployments.engine.inside`.

Settings are validated by processes that load neither Ray nor vLLM, so this file names their classes
and loads them late.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoscale.capacity.profile import load_profile
from conserve.direct import Notice
from conserve.settings import Settings, SettingsError
from conserve.wire import SILENCE_S, Role
from conserve_inside.border import offer_border
from conserve_inside.policy.division import TBT_BOUND_S, plan_stages
from conserve_inside.sm_slots.lease import (
    SLOT_ENVIRONMENT,
    SLOT_LANE_WORKER,
    SLOT_WORKER,
    lease_of,
    tell_worker,
)
from deployments.engine.inside import GiveBack, Inside
from deployments.messages import Heard, SchedulerLoad
from deployments.upstream import unreachable_scheduler
from deployments.upstream.patch import require
from deployments.upstream.seams import require_seams
from hetero.gpus import EngineUse
from hetero.sm_slots import SmLease
from hetero.tiers import RoleTier

if TYPE_CHECKING:
    from fastapi import FastAPI

    from conserve_inside.scheduler.commands import SchedulerClient
    from deployments.node.node import NodeClient

_SCHEDULER = "conserve_inside.scheduler.scheduling.conversation_scheduler"
_LANE_WORKER = "conserve_inside.lane.worker.LaneWorker"
_CPU_LANE_WORKER = "conserve_inside.lane.cpu_worker.LaneWorker"
_LANE_CONNECTOR = {
    "kv_connector": "LaneConnector",
    "kv_connector_module_path": "conserve_inside.lane.connector",
}
TOWER_CONNECTOR = {
    "ec_connector": "OffloadedTowerCache",
    "ec_connector_module_path": "conserve_inside.tower.connector",
}
# In the encoder-cache connector's configuration: how many layers of the tower stay on the GPU.
TOWER_LAYERS = "conserve.tower_layers"


class InsideEngine(Inside):
    """Schedules by conversations, computes beside steps, keeps to SMs, and offloads the tower."""

    def __init__(self, role: Role, settings: Settings, tier: RoleTier) -> None:
        self._settings, self._tier = settings, tier
        self._schedules = settings.schedules_conversations and settings.hosts(role)
        self._has_lane = self._schedules and "lane" in settings.mechanisms
        self._tower_layers = None if role == "encoder" else settings.media.tower_layers
        self._scheduler: SchedulerClient | None = None
        # Tells the node that the engine has ended, where it may have SMs.
        self._leave: Callable[[], Awaitable[None]] | None = None

    # --- As the application is built --------------------------------------------------------------

    def arguments(self, engine: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._schedules:
            # With this policy vLLM's scheduler uses priorities, which our scheduler sets.
            found = {"scheduler_cls": _SCHEDULER, "scheduling_policy": "priority"}
            given = engine.get("additional_config") or {}
            if ours := self._for_scheduler(given.get("conserve") or {}):
                found["additional_config"] = given | {"conserve": ours}
        if self._has_lane:
            found["kv_transfer_config"] = engine["kv_transfer_config"] | _LANE_CONNECTOR
            found["worker_cls"] = _LANE_WORKER if gpu else _CPU_LANE_WORKER
        if self._tier.sm_slots is not None:
            found["worker_cls"] = SLOT_LANE_WORKER if self._has_lane else SLOT_WORKER
        return found

    def _for_scheduler(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what `ConversationScheduler` is told, with what an operator has given."""
        told, settings = dict(given), self._settings
        steps = [one for one in settings.mechanisms if one != "lane"]
        if len(steps) < 3:  # Unset, it has all three.
            told = {"mechanisms": steps} | told
        if settings.tpot_bound_s is not None:
            told["chunks"] = (told.get("chunks") or {}) | {"late_s": settings.tpot_bound_s}
        if self._has_lane and (shares := stage_shares(settings)):
            told = {"stages": shares} | told
        return told

    def environment(self) -> dict[str, str]:
        return {} if self._tier.sm_slots is None else SLOT_ENVIRONMENT

    # --- As an engine starts ----------------------------------------------------------------------

    def require(self) -> None:
        if self._schedules:
            require_seams("scheduler")
            require(unreachable_scheduler.PATCH)
        if self._has_lane:
            require_seams("prefill_lane")
        if self._tier.sm_slots is not None:
            require_seams("sm_slots")

    def configured(
        self, engine: Mapping[str, Any], engine_id: str, node: "NodeClient"
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._tower_layers is not None:
            images = engine.get("ec_transfer_config")
            if images is None:
                name = self._settings.model_id
                raise SettingsError(f"media.tower_layers: {name} reads text only; unset it")
            extra = images["ec_connector_extra_config"] | {TOWER_LAYERS: self._tower_layers}
            found["ec_transfer_config"] = {
                **images, **TOWER_CONNECTOR, "ec_connector_extra_config": extra,
            }  # fmt: skip
        if self._tier.sm_slots is not None:
            # Its worker leases SMs while the model loads, and a lease needs an engine that beats.
            node.use = EngineUse(engine_id, (), self._tier.cap)
            self._leave = functools.partial(node.leave, engine_id)
            kv = engine["kv_transfer_config"]
            told = tell_worker(self._tier.sm_slots, engine_id, node.actor_name)
            extra = kv["kv_connector_extra_config"] | told
            found["kv_transfer_config"] = {**kv, "kv_connector_extra_config": extra}
        return found

    async def started(
        self, client: Any, call_workers: Callable[[str], Awaitable[list[Any]]]
    ) -> tuple[SmLease, ...]:
        if self._schedules:
            from conserve_inside.scheduler.commands import SchedulerClient

            self._scheduler = SchedulerClient(client)
        if self._tier.sm_slots is None:
            return ()
        # By its name: `SlotWorker` cannot be imported without loading vLLM's worker.
        return tuple(lease_of(said) for said in await call_workers("conserve_sm_lease"))

    def add_routes(self, app: "FastAPI") -> None:
        if self._scheduler is not None:
            offer_border(app, self._scheduler.command)

    # --- As it serves -----------------------------------------------------------------------------

    def load(self) -> SchedulerLoad | None:
        return None if self._scheduler is None else self._scheduler.load()

    def hear(self, notice: Notice) -> None:
        if self._scheduler is not None:
            self._scheduler.hear(notice)

    def heard(self, heard: Heard) -> None:
        if self._scheduler is not None:
            self._scheduler.release(heard.ended)
            if "retention" in self._settings.mechanisms:
                self._scheduler.hold(heard.holds)

    async def ended(self, give_back: GiveBack) -> None:
        if self._leave is not None:
            await give_back("SM slots", self._leave(), SILENCE_S)


def stage_shares(settings: Settings) -> dict[str, Any]:
    """Return the SMs of decodes beside each stage, as an engine with a lane is told of them.

    By stage S*, S_min and d (`DecodeShare`), and as ``sms`` the SMs that they are parts of. Empty
    if the settings' profile has no stages. Raises `ProfileError`.
    """
    curves = None if settings.profile is None else load_profile(settings.profile).stages
    if curves is None:
        return {}
    plan = plan_stages(curves, settings.tpot_bound_s or TBT_BOUND_S)
    return {"sms": curves.sms} | {stage: list(share) for stage, share in plan.shares.items()}


ADDON = InsideEngine
