"""Names the GPUs of an engine's workers, and has a worker wait for its GPU's memory.

vLLM adds `GpuWorker` to the worker's class by ``worker_extension_cls``, and calls its methods by
``collective_rpc``, which takes a method's name.
"""

import functools
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from deployments.engine.sm_slots.lease import lease_of
from deployments.node.lmcache_server import REAPED_S
from hetero.cards import wait_for_memory
from hetero.nvml import Gpu, Nvml, NvmlError
from hetero.sm_slots import SmLease

logger = logging.getLogger("vllm.conserve")

EXTENSION = "deployments.engine.gpu_worker.GpuWorker"

# Beyond what LMCache's server needs to miss an engine: the end of the process, and of CUDA.
TIMEOUT_S = REAPED_S + 22.5


class WorkerClient:
    """Calls the workers of one engine, by its ``collective_rpc``."""

    def __init__(self, call: Callable[[str], Awaitable[list[Any]]]) -> None:
        self._call = call

    async def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(await self._call(GpuWorker.conserve_gpu_uuid.__name__))

    async def sm_leases(self) -> tuple[SmLease, ...]:
        """Return the SMs that workers have leased (`SlotWorker.conserve_sm_lease`)."""
        # By its name: `SlotWorker` cannot be imported without loading vLLM's worker.
        return tuple(lease_of(said) for said in await self._call("conserve_sm_lease"))

    async def shutdown(self) -> None:
        """Have workers give back their memory, by a method of vLLM's own."""
        await self._call("shutdown")


class GpuWorker:
    device: Any

    def conserve_gpu_uuid(self) -> str:
        """Return this worker's GPU, by its name in NVML.

        CUDA is asked, since an index may mean another GPU to NVML or behind CUDA_VISIBLE_DEVICES.
        """
        import torch

        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        try:
            with Nvml() as nvml:
                return nvml_name(uuid, nvml.inventory())
        except NvmlError:
            # Nothing is metered or capped without NVML, so only people read the name.
            return nvml_name(uuid, ())


def nvml_name(uuid: str, gpus: Iterable[Gpu]) -> str:
    """Return NVML's name of a device, a whole GPU or a MIG part, by CUDA's bare UUID."""
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    part = f"MIG-{uuid}"
    if any(part == device.uuid for gpu in gpus for device in gpu.mig_devices):
        return part
    return f"GPU-{uuid}"


def wait_for_predecessor() -> None:
    """Have this process wait for its GPU's memory before vLLM looks whether there is enough.

    vLLM 0.29 ends an engine at once that finds too little. What a killed engine had is free only
    when LMCache's server misses its heartbeats. This replaces ``request_memory`` of vLLM 0.29.0's
    ``v1/worker/utils`` and ``v1/worker/gpu_worker``: check it when the version changes.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker import utils

    request = getattr(utils, "request_memory", None)
    if request is None:
        logger.warning(
            "this vLLM has no request_memory to replace, so an engine may not start while its "
            "predecessor's memory is mapped; adapt deployments/engine/gpu_worker.py to this version"
        )
        return
    if hasattr(request, "__wrapped__"):
        return
    patient = _patient(request)
    utils.request_memory = patient
    worker = sys.modules.get("vllm.v1.worker.gpu_worker")
    if worker is not None:
        worker.request_memory = patient  # type: ignore[attr-defined]


def _patient(request: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(request)
    def requested(init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
        total_bytes = init_snapshot.total_memory
        needed_bytes = math.ceil(total_bytes * cache_config.gpu_memory_utilization)
        needed_bytes -= external_weight_memory
        if init_snapshot.free_memory < needed_bytes <= total_bytes:
            worker = GpuWorker()
            worker.device = init_snapshot.device_
            try:
                with Nvml() as nvml:
                    uuid = worker.conserve_gpu_uuid()
                    wait_for_memory(nvml, uuid, needed_bytes, TIMEOUT_S)
            except NvmlError as error:
                logger.warning("not waiting for the GPU's memory: %s", error)
            init_snapshot.measure()
        return request(init_snapshot, cache_config, external_weight_memory)

    return requested
