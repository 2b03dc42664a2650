"""vLLM's worker on leased SMs, with a lane (``worker_cls``)."""

from deployments.engine.lane.working import LaneWorking
from deployments.engine.sm_slots.worker import SlotWorker


class LaneWorker(LaneWorking, SlotWorker):
    """Steps and the lane's chunks overlap, each on its side of the engine's SMs."""
