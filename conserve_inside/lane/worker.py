"""vLLM's worker on a GPU with a lane, and how one chunk of a prompt passes through the model.

`LaneForward` builds what vLLM's model runner builds for a batch of one request. It has attention
metadata builders of its own, since the runner's have buffers that the current step uses. Internals
of vLLM that are used are in the record `prefill_lane` of `upstream/seams.toml`.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.multimodal.utils import (
    get_mm_features_in_window,
    group_and_batch_mm_kwargs,
    set_mm_embedding_modality,
)
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import sanity_check_mm_encoder_outputs

from conserve_inside.lane.images import Encode, Found
from conserve_inside.lane.scheduler_lane import Job
from conserve_inside.lane.thread import Turns
from conserve_inside.scratch import shared_scratch
from conserve_inside.sm_slots.pairs import GraphSets, slot_pairs
from deployments.engine.vision.connector import read_encoded

logger = logging.getLogger("vllm.conserve")


class LaneForward:
    """Computes chunks with an engine's model, on the lane's stream, never as a CUDA graph."""

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        self._runner = runner
        # Not the wrapper around it that replays CUDA graphs.
        self._model = runner.get_model()
        self._config = vllm_config
        self._device = runner.device
        self._plain = plain_stream(runner.device)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._most_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._model_config = vllm_config.model_config
        self._reads_images = bool(self._model_config.is_multimodal_model)
        # The last job, and its positions where they are not just numbers.
        self._placed: tuple[Job, torch.Tensor] | None = None
        self._pause: Callable[[], None] | None = None
        self.prefills = not (
            # Such models pass embeddings to later layers in buffers that steps use.
            any("deepstack" in name for name in vars(self._model))
            # An image's tokens attend to all of it, also behind a chunk's end.
            or self._model_config.is_mm_prefix_lm
        )
        if not self.prefills:
            logger.info("the lane encodes images; this model's prompts are prefilled in steps")
        for block in tower_blocks(self._model) if self._reads_images else ():
            block.register_forward_pre_hook(self._between_blocks)
        self._groups = []
        for group in runner.attn_groups[0]:
            # A kernel's block may be a part of the scheduler's.
            kernel_tokens = int(group.get_metadata_builder().kv_cache_spec.block_size)
            own = replace(group, metadata_builders=[])
            own.create_metadata_builders(vllm_config, self._device, kernel_tokens)
            self._groups.append((own, kernel_tokens))

    def prepare(self) -> None:
        self._thread = threading.get_ident()
        if self._plain is not None:
            torch.cuda.set_device(self._device)

    def mark(self) -> Any:
        """Return an event behind all that was launched on the steps' stream; None on a CPU."""
        if self._plain is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: Any) -> None:
        """Wait for launched steps, which may still read or write blocks that are the lane's now."""
        if mark is not None:
            lane_stream(self._plain).wait_event(mark)

    def compute(self, job: Job, start: int, end: int) -> Callable[[], None]:
        stream = lane_stream(self._plain)
        on_stream = torch.cuda.stream(stream) if stream else contextlib.nullcontext()
        with torch.inference_mode(), on_stream:
            positions = torch.arange(start, end, dtype=torch.int64, device=self._device)
            ids = torch.tensor(job.tokens[start:end], dtype=torch.int32, device=self._device)
            metadata, slots = self._metadata(job, start, end, positions)
            embeds = self._embedded(job, start, end, ids) if self._reads_images else None
            if embeds is not None and not self._model.requires_raw_input_tokens:
                ids = None
            with set_forward_context(
                metadata,
                self._config,
                num_tokens=end - start,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=slots,
            ):
                self._model(
                    input_ids=ids,
                    positions=self._positions(job, start, end, positions),
                    intermediate_tensors=None,
                    inputs_embeds=embeds,
                )
            return _until_here(stream)

    def encode(self, image: Encode, pause: Callable[[], None]) -> tuple[Any, Callable[[], None]]:
        stream = lane_stream(self._plain)
        on_stream = torch.cuda.stream(stream) if stream else contextlib.nullcontext()
        with torch.inference_mode(), on_stream:
            self._pause = pause
            try:
                embeds = self._encode(image.image)
            finally:
                self._pause = None
            return embeds, _until_here(stream)

    def _encode(self, image: Any) -> torch.Tensor:
        batches = group_and_batch_mm_kwargs(
            [(image.modality, image.data)], device=self._device, pin_memory=PIN_MEMORY
        )
        ((_, _, inputs),) = batches
        embeds = self._model.embed_multimodal(**inputs)
        sanity_check_mm_encoder_outputs(embeds, expected_num_items=1)
        encoded: torch.Tensor = embeds[0]
        return encoded

    def load(self, image: Found) -> None:
        self._encoder_cache()[image.identifier] = read_encoded(image.data)

    def keep(self, image: Encode, embeds: torch.Tensor) -> None:
        if self._plain is not None:
            # Its memory is of the lane's stream, and steps read it.
            embeds.record_stream(torch.cuda.current_stream(self._device))
        cache = self._encoder_cache()
        cache[image.image.identifier] = embeds
        if has_ec_transfer():
            get_ec_transfer().save_caches(cache, image.image.identifier)

    def _encoder_cache(self) -> Any:
        # vLLM's second runner has an object around the dictionary.
        cache = self._runner.encoder_cache
        return getattr(cache, "encoder_outputs", cache)

    def _between_blocks(self, *_: Any) -> None:
        if self._pause is not None and threading.get_ident() == self._thread:
            self._pause()

    def _embedded(self, job: Job, start: int, end: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of a chunk's text and images: [end - start, width]."""
        found = []
        is_image = torch.zeros(end - start, dtype=torch.bool, pin_memory=PIN_MEMORY)
        first_image, last_image = get_mm_features_in_window(list(job.images), start=start, end=end)
        for image in job.images[first_image:last_image]:
            place = image.mm_position
            first, last = max(0, start - place.offset), min(place.length, end - place.offset)
            begin, stop = place.get_embeds_indices_in_range(first, last)
            if begin == stop:
                continue
            embeds = self._encoder_cache()[image.identifier]
            if self._plain is not None:
                embeds.record_stream(torch.cuda.current_stream(self._device))
            own = is_image[place.offset + first - start : place.offset + last - start]
            if place.is_embed is None:
                embeds = embeds[first:last]
                own[:] = True
            else:
                embeds = embeds[begin:stop]
                own |= place.is_embed[first:last]
            set_mm_embedding_modality(embeds, image.modality)
            found.append(embeds)
        embedded: torch.Tensor = self._model.embed_input_ids(
            ids, multimodal_embeddings=found, is_multimodal=is_image
        )
        return embedded

    def _positions(self, job: Job, start: int, end: int, positions: torch.Tensor) -> torch.Tensor:
        """Return a chunk's positions for the model: [end - start], or with M-RoPE several each."""
        if not self._model_config.uses_mrope:
            return positions
        if self._placed is None or self._placed[0] is not job:
            placed, _ = self._model.get_mrope_input_positions(list(job.tokens), list(job.images))
            self._placed = job, placed
        # One wider than a step's most tokens, as the runner's: compiled code counts on that.
        shape = self._model_config.mrope_num_dims, self._most_tokens + 1
        wide = torch.empty(shape, dtype=torch.int64, device=self._device)
        wide[:, : end - start] = self._placed[1][:, start:end]
        return wide[:, : end - start]

    def _metadata(
        self, job: Job, start: int, end: int, positions: torch.Tensor
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return attention metadata and slots (int64, [end - start]), each by layer."""
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        count = end - start
        # int32 on the host: [requests + 1] and [requests].
        begins = torch.tensor([0, count], dtype=torch.int32)
        length = torch.tensor([end], dtype=torch.int32)
        for group, kernel_tokens in self._groups:
            table = self._table(job, kernel_tokens)
            at = table[0].to(torch.int64)[positions // kernel_tokens]
            slot = at * kernel_tokens + positions % kernel_tokens
            common = CommonAttentionMetadata(
                query_start_loc=begins.to(self._device),
                query_start_loc_cpu=begins,
                seq_lens=length.to(self._device),
                seq_lens_cpu_upper_bound=length,
                num_reqs=1,
                num_actual_tokens=count,
                max_query_len=count,
                max_seq_len=end,
                block_table_tensor=table,
                slot_mapping=slot,
                causal=True,
                is_prefilling=torch.tensor([True]),
                positions=positions,
            )
            built = group.get_metadata_builder().build(0, common)
            for layer in group.layer_names:
                metadata[layer], slots[layer] = built, slot
        return metadata, slots

    def _table(self, job: Job, kernel_tokens: int) -> torch.Tensor:
        """Return the request's blocks in the kernel's block size: int32, [1, blocks]."""
        ids = torch.tensor([list(job.block_ids)], dtype=torch.int32)
        parts = self._block_tokens // kernel_tokens
        if parts > 1:
            ids = (ids[:, :, None] * parts + torch.arange(parts, dtype=torch.int32)).flatten(1)
        return ids.to(self._device)


def _until_here(stream: Any) -> Callable[[], None]:
    """Return a call that waits for what was launched on a stream; None: nothing is under way."""
    if stream is None:
        return lambda: None
    done = torch.cuda.Event()
    done.record(stream)
    wait: Callable[[], None] = done.synchronize
    return wait


def tower_blocks(model: Any) -> list[torch.nn.Module]:
    """Return the layers of a model's encoders: of each its longest list of modules."""
    found: list[torch.nn.Module] = []
    modules = dict(model.named_modules())
    for name in model._tower_model_names:
        lists = [[*one] for one in modules[name].modules() if isinstance(one, torch.nn.ModuleList)]
        longest: list[torch.nn.Module] = max(lists, key=len, default=[])
        found += longest
    return found


def plain_stream(device: Any) -> Any:
    """Return a stream whose kernels share all SMs with the decodes'; None on a CPU."""
    return None if device.type == "cpu" else torch.cuda.Stream(device)


def lane_stream(plain: Any) -> Any:
    """Return the stream of the lane's SMs, or the plain one where there is no border.

    Call it within a chunk's turn, since the border moves between steps.
    """
    return slot_pairs().bound.lane_stream or plain


class LaneWorking:
    _turns: Turns | None = None
    _graphs: GraphSets | None = None

    def compile_or_warm_up_model(self) -> Any:
        worker: Any = self
        took = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self._turns is None:
            if (why := shared_scratch(worker.model_runner.get_model())) is not None:
                raise ValueError(
                    f"engine_scheduler: {why}, and steps and the prefill lane would mix theirs; "
                    "set engine_scheduler=conversation"
                )
            self._graphs = self._capture_for_each_border()
            turns = self._turns = Turns(alternate=worker.device.type == "cpu")
            forward = LaneForward(worker.model_runner, worker.vllm_config)
            get_kv_transfer_group().start_lane(forward, turns)
        return took

    def _capture_for_each_border(self) -> GraphSets | None:
        return None

    def execute_model(self, scheduler_output: Any) -> Any:
        """Move the border between the step's SMs and the lane's, then run the step."""
        with self._turns.step() if self._turns else nullcontext():
            notes = getattr(scheduler_output.kv_connector_metadata, "lane", None)
            if notes is not None and notes.decode_sms is not None:
                bound = slot_pairs().bind(notes.decode_sms)
                if self._graphs is not None:
                    self._graphs.use(bound.decode_sms)
            return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step in its turn, since a drafter would run the model here."""
        with self._turns.step(ends=False) if self._turns else nullcontext():
            return super().sample_tokens(grammar_output)  # type: ignore[misc]


class LaneWorker(LaneWorking, Worker):  # type: ignore[misc]  # vLLM's types are not looked at.
    """vLLM's worker on a GPU (``worker_cls``): overlaps steps and the lane's chunks."""
