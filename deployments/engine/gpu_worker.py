"""Names the GPUs of an engine's workers.

vLLM adds `GpuWorker` to the worker's class by ``worker_extension_cls``, and calls its methods by
``collective_rpc``, which takes a method's name.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from hetero.engine_needs import CONTEXT_BYTES
from hetero.nvml import Gpu, Nvml, NvmlError

EXTENSION = "deployments.engine.gpu_worker.GpuWorker"


class WorkerClient:
    """Calls the workers of one engine, by its ``collective_rpc``."""

    def __init__(self, call: Callable[[str], Awaitable[list[Any]]]) -> None:
        self._call = call

    async def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(await self._call(GpuWorker.conserve_gpu_uuid.__name__))

    async def keep_to_their_part(self) -> None:
        """Limit the workers of an engine that shares its GPU to their part of it."""
        await self._call(GpuWorker.conserve_keep_to_part.__name__)

    async def shutdown(self) -> None:
        """Have workers give back their memory, by a method of vLLM's own."""
        await self._call("shutdown")


class GpuWorker:
    device: Any
    vllm_config: Any

    def conserve_keep_to_part(self) -> None:
        """Limit PyTorch to the engine's part of the GPU, so that it frees cached memory first.

        PyTorch caches memory per stream, and would otherwise take a neighbour's part.
        """
        import torch

        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        part = float(self.vllm_config.cache_config.gpu_memory_utilization)
        part -= CONTEXT_BYTES / total_bytes
        if torch.cuda.memory_reserved(self.device) < part * total_bytes:
            # Else its KV was told by hand, beyond its part.
            torch.cuda.set_per_process_memory_fraction(part, self.device)

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
