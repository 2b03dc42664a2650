"""Keeps a node's GPUs for its actor: power caps, energy and the ledger of SM slots.

Only GPUs that engines report are looked at. All calls block and belong to one thread.
"""

import logging
import math
import time
import uuid as ids
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conserve.wire import SILENCE_S
from hetero.energy import EnergyMeter, EngineEnergy, GpuReading
from hetero.guard import CapsOutcome, Guard, GuardLost
from hetero.nvml import GpuLost, NotSupported, Nvml, NvmlError, UnknownGpu
from hetero.power import Cap, default_directory
from hetero.sm_slots import NoFreeSms, SmLease, SmSlotLedger
from hetero.sm_units import SmSlots, sm_granularity

logger = logging.getLogger("conserve.node")

# Seconds between attempts to set caps, refused or not, and to open the driver.
RETRY_S = 10.0

# The reason if engines that share a GPU want different caps.
DISAGREED = "Disagreed"


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The GPUs that an engine runs on (none while it loads), and the power cap it wants for them.

    ``leases`` are its SMs, in case the keeper has forgotten them.
    """

    engine_id: str
    gpus: tuple[str, ...]
    cap: Cap | None = None
    leases: tuple[SmLease, ...] = ()


class GpuKeeper:
    """Looks after the GPUs of this node that engines use."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory()
        self._epoch = ids.uuid4().hex
        self._uses: dict[str, EngineUse] = {}
        self._heard_s: dict[str, float] = {}
        self._nvml: Nvml | None = None
        self._opened_s = -math.inf
        self._names: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        self._meters: defaultdict[str, EnergyMeter] = defaultdict(EnergyMeter)
        self._joules: defaultdict[str, float] = defaultdict(float)
        self._readings: dict[str, GpuReading] = {}
        self._guard: Guard | None = None
        self._wanted: dict[str, Cap] = {}
        self._answer = CapsOutcome()
        self._outcome = CapsOutcome()
        self._asked_s = 0.0
        self._said: dict[str, str] = {}
        self.sm_ledger = SmSlotLedger({})

    def beat(self, use: EngineUse, now_s: float) -> EngineEnergy | None:
        """Note that an engine lives; return the energy its GPUs have used for it, if known."""
        self._uses[use.engine_id] = use
        self._heard_s[use.engine_id] = now_s
        self._open(now_s)
        if self._nvml is None:
            return None
        for lease in use.leases:
            self._restore(lease)
        gpus = [self._readings[uuid] for uuid in self._of(use) if uuid in self._readings]
        if not gpus:
            return None
        integrated = any(self._meters[gpu.uuid].integrated for gpu in gpus)
        return EngineEnergy(self._joules[use.engine_id], self._epoch, integrated, tuple(gpus))

    def lease(self, gpu: str, engine_id: str, slots: int, now_s: float) -> SmLease:
        """Lease an engine slots of a GPU, for as long as it beats.

        Raises:
            NoFreeSms: they are not free; a dead engine's are freed within `SILENCE_S`.
            UnknownGpu: the driver does not show that GPU's SMs here.
        """
        self._open(now_s)
        try:
            lease = self.sm_ledger.lease_slots(gpu, engine_id, slots)
        except KeyError:
            raise UnknownGpu(f"NVML does not show SMs of {gpu} on this node") from None
        # The engine is about to load, and beats from now on.
        self._heard_s[engine_id] = now_s
        logger.info("%s: %d SMs are %s's", gpu, lease.sms, engine_id)
        return lease

    def tick(self, now_s: float) -> None:
        """Forget silent engines, update caps and read every GPU in use. Call it once a second."""
        for engine_id, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > SILENCE_S:
                self.leave(engine_id)
        self._say_free(self.sm_ledger.keep_owners(self._heard_s))
        if self._nvml is None:
            return
        engines: defaultdict[str, list[str]] = defaultdict(list)
        for use in self._uses.values():
            for uuid in self._of(use):
                engines[uuid].append(use.engine_id)
        self._see_to_caps(engines, now_s)
        for uuid, here in engines.items():
            self._read(self._nvml, uuid, here, now_s)
        # A GPU without our engines is not metered.
        self._readings = {uuid: self._readings[uuid] for uuid in engines}
        for uuid in self._meters.keys() - engines.keys():
            del self._meters[uuid]

    def leave(self, engine_id: str) -> None:
        """Forget an engine: its SMs are free now, its GPUs at the next tick."""
        self._uses.pop(engine_id, None)
        self._heard_s.pop(engine_id, None)
        self._joules.pop(engine_id, None)
        self._say_free(self.sm_ledger.release_owner(engine_id))

    def close(self) -> None:
        """Put back every limit, and close the driver."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def state(self) -> dict[str, Any]:
        """Return GPUs and caps in use, for people."""
        return {
            "engines": {use.engine_id: list(use.gpus) for use in self._uses.values()},
            "caps_w": dict(self._outcome.applied_w),
            "caps_refused": dict(self._outcome.refused),
            "power_guard_pid": self._guard.pid if self._guard else None,
            "sm_leases": len(self.sm_ledger.leases()),
        }

    def _open(self, now_s: float) -> None:
        if self._nvml is not None or now_s - self._opened_s < RETRY_S:
            return
        self._opened_s = now_s
        try:
            self._nvml = Nvml()
            inventory = self._nvml.inventory()
        except NvmlError as error:
            self._nvml = None
            self._say("", f"no power, energy or SM slots on this node: {error}")
            return
        slots = {}
        for gpu in inventory:
            unit_sms = sm_granularity(gpu.compute_capability)
            self._names[gpu.uuid] = gpu.name
            self._whole[gpu.uuid] = gpu.uuid
            for part in gpu.mig_devices:
                self._whole[part.uuid] = gpu.uuid
                if part.sm_count:
                    slots[part.uuid] = SmSlots(part.sm_count, unit_sms)
            if gpu.sm_count and not gpu.mig_devices:
                slots[gpu.uuid] = SmSlots(gpu.sm_count, unit_sms)
        # The clock makes these ids higher than those of an earlier actor.
        self.sm_ledger = SmSlotLedger(slots, first_id=time.time_ns())

    def _restore(self, lease: SmLease) -> None:
        """Take in a lease from an earlier keeper, or from before the engine fell silent."""
        about = f"lease {lease.id}"
        try:
            self.sm_ledger.restore(lease)
        except (NoFreeSms, KeyError, ValueError) as error:
            self._say(
                about,
                f"{lease.owner} runs on SMs that are not its own any more, until it is started "
                f"again: {error}",
            )
        else:
            self._said.pop(about, None)

    def _say_free(self, leases: list[SmLease]) -> None:
        for lease in leases:
            logger.info("%s: %d SMs of %s are free again", lease.gpu, lease.sms, lease.owner)

    def _of(self, use: EngineUse) -> list[str]:
        return list(dict.fromkeys(self._whole.get(uuid, uuid) for uuid in use.gpus))

    def _see_to_caps(self, engines: dict[str, list[str]], now_s: float) -> None:
        wanted: dict[str, Cap] = {}
        disagreed = CapsOutcome()
        for uuid, here in engines.items():
            caps = {self._uses[engine_id].cap for engine_id in here}
            cap = next(iter(caps))
            if len(caps) == 1 and cap is not None:
                wanted[uuid] = cap
            elif len(caps) > 1:
                disagreed.reasons[uuid] = DISAGREED
                disagreed.refused[uuid] = (
                    "engines of different tiers share this GPU; give each a GPU of "
                    "its own (num_gpus: 1), or their tiers the same power cap"
                )
        due = wanted != self._wanted or now_s - self._asked_s >= RETRY_S
        if due and (wanted or self._guard is not None):
            # Asking every RETRY_S also notices a dead guard, and starts another.
            self._asked_s = now_s
            self._answer = self._ask(wanted, set(engines))
            self._wanted = wanted
        elif not wanted:
            self._answer = CapsOutcome()
        self._outcome = CapsOutcome(
            self._answer.applied_w,
            self._answer.refused | disagreed.refused,
            self._answer.reasons | disagreed.reasons,
        )
        for uuid in engines:
            self._say_what_holds(uuid)

    def _say_what_holds(self, uuid: str) -> None:
        limit_w = self._outcome.applied_w.get(uuid)
        refusal = self._outcome.refused.get(uuid)
        if limit_w is not None:
            self._say(uuid, f"{uuid}: limited to {limit_w:g} W", logging.INFO)
        elif refusal is not None:
            text = refusal if uuid in refusal else f"{uuid}: {refusal}"
            self._say(uuid, f"serving on without a power cap: {text}")
        elif uuid in self._said:
            self._say(uuid, f"{uuid}: not limited by ConServe any more", logging.INFO)

    def _ask(self, wanted: dict[str, Cap], used: set[str]) -> CapsOutcome:
        try:
            if not wanted:
                if self._guard is not None:
                    self._guard.close()
                    self._guard = None
                return CapsOutcome()
            if self._guard is None:
                self._guard = Guard("conserve's node actor", self._directory)
            return self._guard.want(wanted, used)
        except (GuardLost, OSError) as error:
            # The next guard undoes what this one left, and takes over.
            self._guard = None
            reasons = dict.fromkeys(wanted, type(error).__name__)
            return CapsOutcome({}, dict.fromkeys(wanted, str(error)), reasons)

    def _read(self, nvml: Nvml, uuid: str, engines: list[str], now_s: float) -> None:
        draw_w = self._value(nvml.draw_w, uuid)
        counter_j = self._value(nvml.energy_j, uuid)
        used_j = self._meters[uuid].read(now_s, counter_j, draw_w)
        # The driver does not tell engines apart.
        for engine_id in engines:
            self._joules[engine_id] += used_j / len(engines)
        temperature_c = self._value(nvml.temperature_c, uuid)
        self._readings[uuid] = GpuReading(
            uuid=uuid,
            name=self._names.get(uuid, ""),
            draw_w=draw_w,
            limit_w=self._value(nvml.limit_w, uuid),
            utilisation=self._value(nvml.utilisation, uuid),
            temperature_c=None if temperature_c is None else int(temperature_c),
            cap_w=self._outcome.applied_w.get(uuid),
            refusal=self._outcome.reasons.get(uuid, ""),
        )

    def _value(self, read: Callable[[str], float], uuid: str) -> float | None:
        # A lost GPU answers nothing; log that once, not for each reading.
        lost, what = f"{uuid}: lost", f"{uuid}: {read.__name__}"
        try:
            value = read(uuid)
        except GpuLost as error:
            self._say(lost, str(error))
            return None
        except NvmlError as error:
            level = logging.INFO if isinstance(error, NotSupported) else logging.WARNING
            self._say(what, f"{error} ({read.__name__})", level)
            return None
        self._said.pop(lost, None)
        self._said.pop(what, None)
        return value

    def _say(self, about: str, text: str, level: int = logging.WARNING) -> None:
        """Log a line for operators, unless it is the same as the last one about this subject."""
        if self._said.get(about) != text:
            self._said[about] = text
            logger.log(level, "%s", text)
