"""A worker of vLLM's that lets the lane have its turn; `cpu_worker` and `gpu_worker` are two."""

from contextlib import nullcontext
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from deployments.engine.lane.forward import LaneForward
from deployments.engine.lane.turns import Turns
from deployments.engine.sm_slots.graph_sets import GraphSets
from deployments.engine.sm_slots.pairs import slot_pairs


class LaneWorking:
    """Is laid over vLLM's worker."""

    _turns: Turns | None = None
    _graphs: GraphSets | None = None

    def compile_or_warm_up_model(self) -> Any:
        """Also start the lane, when all else is ready."""
        worker: Any = self
        took = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self._turns is None:
            self._graphs = self._capture_for_each_border()
            turns = self._turns = Turns(alternate=worker.device.type == "cpu")
            forward = LaneForward(worker.model_runner, worker.vllm_config)
            get_kv_transfer_group().start_lane(forward, turns)
        return took

    def _capture_for_each_border(self) -> GraphSets | None:
        """CUDA graphs, where there is a border that moves."""
        return None

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step, once the border between its SMs and the lane's is where it is to be."""
        with self._turns.step() if self._turns else nullcontext():
            notes = getattr(scheduler_output.kv_connector_metadata, "lane", None)
            if notes is not None and notes.decode_sms is not None:
                bound = slot_pairs().bind(notes.decode_sms)
                if self._graphs is not None:
                    self._graphs.use(bound.decode_sms)
            return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Its end; a drafter would run the model here."""
        with self._turns.step(ends=False) if self._turns else nullcontext():
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
