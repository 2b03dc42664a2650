"""vLLM's worker on leased SMs, with a lane (``worker_cls``)."""

from deployments.engine.lane.working import LaneWorking
from deployments.engine.sm_slots.graph_sets import GraphSets
from deployments.engine.sm_slots.pairs import slot_pairs
from deployments.engine.sm_slots.worker import SlotWorker


class LaneWorker(LaneWorking, SlotWorker):
    """Steps and the lane's chunks overlap, each on its side of the engine's SMs."""

    def _capture_for_each_border(self) -> GraphSets | None:
        graphs = GraphSets(self.model_runner, slot_pairs())
        graphs.capture()
        return graphs
