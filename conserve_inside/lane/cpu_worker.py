"""vLLM's worker on a CPU, with a lane (``worker_cls``).

In a file of its own, since vLLM's module for it replaces functions of PyTorch's as it is loaded.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from conserve_inside.lane.worker import LaneWorking


class LaneWorker(LaneWorking, CPUWorker):  # type: ignore[misc]  # vLLM's types are not looked at.
    pass
