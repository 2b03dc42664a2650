"""vLLM's worker on a GPU, with a lane (``worker_cls``)."""

from vllm.v1.worker.gpu_worker import Worker

from deployments.engine.lane.working import LaneWorking


class LaneWorker(LaneWorking, Worker):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Steps and the lane's chunks overlap."""
