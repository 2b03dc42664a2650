"""What an engine's workers are asked about their GPUs; vLLM mixes it into its worker's class.

``worker_extension_cls`` and ``collective_rpc`` are vLLM's public way to reach a worker. Engines on
a CPU go without.
"""

from typing import Any

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
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
