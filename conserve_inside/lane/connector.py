"""The lane as a KV connector, in front of another one.

A prompt of which the other connector has nothing may go to the lane. vLLM is told that the rest of
the prompt is loaded asynchronously. It keeps the request aside with its blocks, and goes on with it
when the worker has computed it. What LMCache has is loaded as without a lane.
"""

from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from conserve_inside.lane.scheduler_lane import LaneReport, SchedulerLane
from conserve_inside.lane.thread import Forward, LaneThread, Turns
from conserve_inside.sm_slots.pairs import slot_pairs
from deployments.engine.lmcache_connector import ResilientMPConnector
from deployments.upstream.seams import require_seams


class LaneConnecting(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM's types are not seen.
    """Lays the lane over a KV connector. The scheduler sets ``lane`` in its own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        require_fit(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self.lane: SchedulerLane | None = None
        # Requests whose next load is the lane's, if there is room for it.
        self._promised: set[str] = set()
        self._lane_thread: LaneThread | None = None
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._missing: set[int] = set()
        self._report: LaneReport | None = None
        # Of this worker, not reported yet.
        self._begins: LaneReport | None = None

    # --- the scheduler's side ---------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        lane = self.lane
        self._promised.discard(request.request_id)
        if lane is not None and lane.has_failed(request.request_id):
            self._lane_has_failed(request.request_id)
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if lane is None or matched[0] is None:
            return matched
        if not lane.has_images_of(request, num_computed_tokens + matched[0]):
            return None, False
        if matched[0]:
            return matched
        route = lane.route(request, num_computed_tokens)
        if route == "wait":
            return None, False
        if route == "inline":
            return matched
        self._promised.add(request.request_id)
        # The last token is left to the step in which the first one of the answer is sampled.
        return request.num_tokens - 1 - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Keep from the other connector what the lane loads."""
        if self.lane is not None and num_external_tokens and request.request_id in self._promised:
            self._promised.remove(request.request_id)
            found_tokens = request.num_tokens - 1 - num_external_tokens
            self.lane.takes(request, found_tokens, num_external_tokens, blocks.get_block_ids()[0])
            num_external_tokens = 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        computes = scheduler_output.total_num_scheduled_tokens > 0
        freed = scheduler_output.free_encoder_mm_hashes
        metadata.lane = None if self.lane is None else self.lane.notes(computes, freed)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, LaneReport):
            report = None
        if self.lane is not None:
            self.lane.hears(report, connector_output.finished_recving or set())
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._promised.discard(request.request_id)
        return super().request_finished(request, block_ids)

    def lane_encoded(self, lasted_s: float, embeds: int) -> None: ...

    def _lane_has_failed(self, request_id: str) -> None: ...

    # --- the worker's side ------------------------------------------------------------------------

    def start_lane(self, forward: Forward, turns: Turns) -> None:
        self._lane_thread = LaneThread(forward, turns, self._block_tokens)
        sizes_sms = slot_pairs().sizes_sms
        self._begins = LaneReport(sizes_sms=sizes_sms, prefills=forward.prefills)

    def has_connector_metadata(self) -> bool:
        """Return False in the lane's thread, where attention layers leave the connector alone."""
        if self._lane_thread is not None and self._lane_thread.is_current():
            return False
        return bool(super().has_connector_metadata())

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        notes = self._get_connector_metadata().lane
        if notes is not None and self._lane_thread is not None:
            self._lane_thread.begin(notes)
        super().start_load_kv(forward_context, **options)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        if self._lane_thread is None:
            return sent, received
        self._lane_thread.give_up(finished_req_ids)
        over, self._missing, self._report = self._lane_thread.take()
        if self._begins is not None:
            begins, self._begins = self._begins, None
            self._report = replace(
                self._report or begins, sizes_sms=begins.sizes_sms, prefills=begins.prefills
            )
        if over:
            received = over | (received or set())
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Add blocks that the lane could not compute, for vLLM to compute inline."""
        failed: set[int] = super().get_block_ids_with_load_errors()
        missing, self._missing = self._missing, set()
        return failed | missing

    def build_connector_worker_meta(self) -> Any:
        report, self._report = self._report, None
        return report or super().build_connector_worker_meta()

    def shutdown(self) -> None:
        """End the lane first, since it writes to memory that is given back next."""
        if self._lane_thread is not None:
            self._lane_thread.end()
        super().shutdown()


class LaneConnector(LaneConnecting, ResilientMPConnector):
    """Lays the lane over LMCache's connector.

    What the lane computes is stored as if it were computed inline, and counts as no cache's hit.
    """

    def unmap(self) -> None:
        """End the lane before the server unmaps the memory that it writes to."""
        if self._lane_thread is not None:
            self._lane_thread.end()
        super().unmap()

    def lane_encoded(self, lasted_s: float, embeds: int) -> None:
        """Report an encode's duration and embeddings to the engine's server."""
        self._meter.encoded(lasted_s, embeds)

    def _lane_has_failed(self, request_id: str) -> None:
        """Start over as after a load that failed, without another look-up."""
        self._failed.add(request_id)


def require_fit(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse an engine whose prompts the lane cannot compute, or another vLLM; says what to do."""
    require_seams("prefill_lane")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    groups = kv_cache_config.kv_cache_groups
    gpu = vllm_config.device_config.device_type != "cpu"
    reasons = (
        (parallel.world_size > 1, "the engine has several workers"),
        (parallel.data_parallel_size > 1, "the engine has several ranks of data"),
        (
            len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec,
            "not all of the model's layers are full attention of one kind",
        ),
        (model.is_encoder_decoder, "the model's encoder is part of its prompts"),
        (
            model.is_multimodal_raw_input_only_model,
            "the model takes images as they are, and not their embeddings",
        ),
        (
            model.is_multimodal_model and model.multimodal_config.is_multimodal_pruning_enabled(),
            "video_pruning_rate removes tokens of prompts step by step",
        ),
        (gpu and bool(parallel.is_moe_model), "experts of steps and lane would share buffers"),
        (vllm_config.lora_config is not None, "LoRA adapters are switched step by step"),
        (vllm_config.speculative_config is not None, "a drafter would have no KV of the prompt"),
    )
    for applies, why in reasons:
        if applies:
            raise ValueError(
                f"engine_scheduler: {why}, and the prefill lane cannot do that; set "
                "engine_scheduler=conversation"
            )
