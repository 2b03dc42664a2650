"""vLLM's worker on a CPU, with a lane (``worker_cls``)."""

from vllm.v1.worker.cpu_worker import CPUWorker

from deployments.engine.lane.working import LaneWorking


class LaneWorker(LaneWorking, CPUWorker):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Steps and the lane's chunks alternate."""
