"""Tells of the GPUs of an engine's workers; vLLM mixes it into its worker's class.

``worker_extension_cls`` and ``collective_rpc`` are vLLM's public way to reach a worker. Engines on
a CPU go without.
"""

from collections.abc import Iterable
from typing import Any

from hetero.nvml import Gpu, Nvml, NvmlError

EXTENSION = "deployments.engine.gpu_worker.GpuWorker"
GPU_METHOD = "conserve_gpu_uuid"


class GpuWorker:
    """Methods added to every worker of an engine on GPUs."""

    device: Any

    def conserve_gpu_uuid(self) -> str:
        """The GPU that this worker runs on, as NVML names it.

        CUDA is asked about the very device that is used: indices mean different GPUs to CUDA, to
        NVML and behind CUDA_VISIBLE_DEVICES.
        """
        import torch

        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        try:
            with Nvml() as nvml:
                return nvml_name(uuid, nvml.inventory())
        except NvmlError:
            # Nothing is metered or capped without it, so the name is for people alone.
            return nvml_name(uuid, ())


def nvml_name(uuid: str, gpus: Iterable[Gpu]) -> str:
    """NVML's name of a device for which CUDA has a bare UUID: that of a whole GPU or of a part.

    Args:
        gpus: those of this machine.
    """
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    part = f"MIG-{uuid}"
    if any(part == device.uuid for gpu in gpus for device in gpu.mig_devices):
        return part
    return f"GPU-{uuid}"
