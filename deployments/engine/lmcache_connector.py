"""LMCache's connector for vLLM, made to outlive its server.

With LMCacheMPConnector, a dead server delays every step by its message timeout, a server that
restarts or forgets the engine is lost for good, and a failed store ends the engine. The methods
below say what they change. Keys are made of the ``cache_salt`` and of token ids; placeholders of
media are replaced by a value of the item's hash (``LMCacheMPRequestTracker.get_token_ids``).
"""

import functools
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

from conserve.late_kv import LateKV, Loads
from conserve.wire import (
    CHUNK_TOKENS,
    FAILED_IMAGES,
    KEPT_TOKENS,
    LATE,
    MISSED,
    OVERDUE,
    PARK,
    PREFILLED,
    STEPS,
    STORED_TO,
    STORED_TOKENS,
)
from deployments.engine.kv_layers import require_whole_blocks
from deployments.engine.step_meter import StepMeter, StepStats
from deployments.engine.stored import Address, tell_stored
from deployments.engine.stores import (
    Pins,
    StepNotes,
    Steps,
    Stores,
    StoresReport,
    groups_that_give_up,
)
from deployments.engine.vision.images import failures
from deployments.kv_identity import cache_name
from deployments.node.lmcache_server import wait_for_server
from deployments.upstream import lost_server
from deployments.upstream.lost_server import Connection, fail_fast
from deployments.upstream.patch import require
from deployments.upstream.patches import apply_patches
from deployments.upstream.seams import require_seams

logger = init_logger(__name__)

_UNREGISTER_TIMEOUT_S = 2.0


class ResilientMPConnector(LMCacheMPConnector):  # type: ignore[misc]  # LMCache ships no types.
    """vLLM makes one in its scheduler and one in each worker, by name."""

    # Whether it stores only what it is told to, as a decoder does.
    _parks = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        require_seams("lmcache_connector")
        require(lost_server.PATCH)
        apply_patches("connector")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        layers = args[1] if len(args) > 1 else kwargs.get("kv_cache_config")
        require_whole_blocks(vllm_config, layers, extra.get(CHUNK_TOKENS))
        wait_for_server(urlsplit(extra["lmcache.mp.host"]).hostname, extra["lmcache.mp.port"])
        super().__init__(vllm_config, *args, **kwargs)
        half = self.scheduler_adapter if hasattr(self, "scheduler_adapter") else self.worker_adapter
        half.model_name = cache_name(half.model_name, vllm_config)
        self._parks = vllm_config.kv_transfer_config.kv_role == "kv_both"
        give_up = groups_that_give_up(layers)
        if hasattr(self, "scheduler_adapter"):
            self._prepare_scheduler(1 + vllm_config.num_speculative_tokens, give_up)
            adapter = self.scheduler_adapter
            for url, client in adapter.req_clients.items():
                fail_fast(client, adapter._health_events[url])
            adapter._ensure_heartbeat_started()
        else:
            worker = self.worker_adapter
            self._prepare_worker(
                fail_fast(worker.req_client, worker._health_event),
                vllm_config.parallel_config.world_size,
                reports=bool(give_up),
            )

    def _prepare_scheduler(self, decode_tokens: int = 1, give_up: tuple[int, ...] = ()) -> None:
        self._late = LateKV()
        self._loads = Loads()
        self._step = 0
        # Requests whose loads have failed: what vLLM does not have is computed.
        self._failed: set[str] = set()
        # Requests of which something was stored, and those that ended since the last step.
        self._storing: set[str] = set()
        self._ended: set[str] = set()
        # Where workers tell that requests' prompts are stored, and of those that ended since the
        # last step.
        self._to_tell: dict[str, Address] = {}
        self._gone: dict[str, Address] = {}
        # Identifiers of the images of current requests.
        self._images: dict[str, list[str]] = {}
        self._pins = Pins(give_up)
        self._meter = StepMeter(decode_tokens)

    def _prepare_worker(
        self, connection: Connection, workers: int = 1, *, reports: bool = False
    ) -> None:
        # With block ids, vLLM would also have running requests with the same prefix recompute it,
        # and drop tokens of their answers; and an engine with several KV groups would end.
        self._report_request_errors = True
        self._steps = Steps()
        tell = functools.partial(tell_stored, workers=workers)
        self._stores = Stores(lambda: connection.losses, tell)
        # Whether the scheduler pins blocks until all workers have stored them.
        self._reports = reports
        # Requests that have ended, and whose blocks are not free yet.
        self._kept: set[str] = set()

    # --- a worker's side --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Start the heartbeat now, not at a first request.

        LMCache's server sends no answer where it cannot map an engine's memory.
        """
        try:
            super().register_kv_caches(kv_caches)
        except ConnectionError as error:
            raise RuntimeError(
                "LMCache's server has not taken this engine's KV space: the log of its node's "
                "actor has the reason. On a GPU it maps the space by CUDA IPC, which is not to be "
                "had under WSL2, gVisor and some virtual GPUs (`conserve doctor` tries it)"
            ) from error
        self.worker_adapter._ensure_heartbeat_started()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait for the stores of preempted requests alone, and not for the GPU."""
        self._stores.wait(kv_connector_metadata.notes.preempted)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        notes = connector_metadata.notes
        self._steps.begin(notes.step)
        if not self._steps.broken:
            self._tell(notes.gone)

    def clear_connector_metadata(self) -> None:
        """End a step; vLLM's older runner also calls it after one that was broken off."""
        if sys.exc_info()[0] is None and self._connector_metadata is not None:
            self._steps.end(self._connector_metadata.notes.step)
        super().clear_connector_metadata()

    def wait_for_save(self) -> None:
        """Begin to store this step's KV, and wait for nothing. A lost store costs a recomputation.

        vLLM's older runner calls this from a ``finally``, also when a SIGTERM for instance broke
        the forward pass off. Storing those blocks would give later conversations with this prompt
        wrong answers. The newer runner may go on with the next step; see `Steps`.
        """
        if self._steps.broken or sys.exc_info()[0] is not None:
            return
        notes = self._get_connector_metadata().notes
        # What was computed of an image that could not be encoded is wrong.
        wrong = {one for one, images in notes.images.items() if failures.include(images)}
        if wrong:
            metadata = self._get_connector_metadata()
            metadata.requests = [one for one in metadata.requests if one.request_id not in wrong]
        try:
            super().wait_for_save()
        except Exception:
            logger.exception("KV was not stored; it will be computed again where it is needed")
        finally:
            self._take_stores(notes.step)
        self._tell(notes.whole)

    def _take_stores(self, step: int) -> None:
        """Keep account of every store; LMCache's adapter keeps only the last of each request."""
        adapter = self.worker_adapter
        copies = isinstance(adapter.transfer_ctx, EngineDrivenTransferContext)
        for request_id, future in adapter.store_futures.items():
            event = adapter.store_events.pop(request_id, None)
            self._stores.add(request_id, future, event, step, copies)
        adapter.store_futures.clear()

    def _tell(self, prompts: Mapping[str, Address]) -> None:
        for request_id, address in prompts.items():
            self._stores.tell_when_stored(request_id, address)

    def build_connector_worker_meta(self) -> Any:
        if not self._reports:
            return super().build_connector_worker_meta()
        # This step's stores may not have begun yet.
        oldest, done = self._stores.oldest_step(), self._steps.done
        return StoresReport(done if oldest is None else min(done, oldest - 1))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose blocks no store needs any more, and those whose load has ended.

        LMCacheMPConnector reports the end of every request of an engine that may store. For one
        that is aborted while it loads vLLM 0.32 is then told of two ends, and fails on the second.
        Here only requests that `request_finished` has kept are reported.
        """
        self._fail_lost_loads()
        _, loaded = super().get_finished(set())
        metadata = self._connector_metadata
        if metadata is not None:
            self._kept |= metadata.notes.ended
        stored = {one for one in self._kept if not self._stores.under_way(one)}
        self._kept -= stored
        return stored, loaded

    def _fail_lost_loads(self) -> None:
        """Have loads of a lost connection fail, and not the engine that asks for their results."""
        loads = self.worker_adapter.retrieve_futures
        for request_id, (future, block_ids) in list(loads.items()):
            try:
                future.query()
            except Exception as error:
                logger.warning("KV of request %s is computed again: %s", request_id, error)
                failed: MessagingFuture[bool] = MessagingFuture()
                failed.set_result(False)
                loads[request_id] = (failed, block_ids)

    def unmap(self) -> None:
        """Have the server unmap this engine's memory, and wait for nothing else."""
        context = self.worker_adapter.transfer_ctx
        answer = None if context is None else context.unregister()
        if answer is not None:
            answer.wait(_UNREGISTER_TIMEOUT_S)

    # --- the scheduler's side ---------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond its own an engine can load, and whether asynchronously.

        Later turns do not ask the server unless something will be stored, since their history is in
        the engine's own cache. Nor do requests for the log-probabilities of their prompts, all of
        which vLLM computes: LMCacheMPConnector would count what it found as cached. Prompts with
        embeddings, each token 0 in LMCache's keys, are neither loaded nor stored.
        """
        params = request.kv_transfer_params or {}
        if request.mm_features:
            self._images[request.request_id] = [image.identifier for image in request.mm_features]
        # Of one that was preempted, workers may have told already.
        if STORED_TO in params and not request.num_preemptions:
            self._to_tell[request.request_id] = params[STORED_TO]
        if request.prompt_embeds is not None:
            self._get_or_create_request_tracker(request).max_offload_tokens = 0
            return 0, False
        if request.skip_reading_prefix_cache:
            tracker = self._get_or_create_request_tracker(request)
            if self._parks:
                tracker.max_offload_tokens = 0
            return 0, False
        failed = request.request_id in self._failed
        if failed:
            # vLLM has freed its blocks. LMCacheMPConnector would forget vLLM's own hit, store late,
            # when blocks of a window are others', and load again for a preempted request.
            self.request_trackers.pop(request.request_id, None)
            self.scheduler_adapter.cleanup_lookup_result(request.request_id)
        stores = self._can_store and (not self._parks or bool(params.get(PARK)))
        tracker = self._get_or_create_request_tracker(request)
        has_all = False
        kept_tokens = params.get(KEPT_TOKENS)
        # A store has to know what the server holds, or it stores it again. A look-up would also
        # load from a disk what host memory lacks, and the engine has.
        if not stores or kept_tokens is not None:
            stored_tokens = params.get(STORED_TOKENS)
            chunk = self.scheduler_adapter.lmcache_tokens_per_chunk
            # A look-up that has begun has to be brought to its end.
            has_all = (
                stored_tokens is not None
                and tracker.lookup_started_at is None
                and num_computed_tokens >= stored_tokens // chunk * chunk
            )
        if not stores:
            tracker.max_offload_tokens = 0
        elif has_all:
            tracker.num_stored_tokens = kept_tokens
        if failed or has_all:
            # cached_token_stats takes it from there; super() would set it too.
            alignment = self._hit_alignment_tokens
            tracker.num_vllm_hit_tokens = num_computed_tokens // alignment * alignment
            return 0, False
        if self._late.waits(request.request_id):
            return None, True
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if matched[0] is None or not params.get(PREFILLED) or request.num_preemptions:
            return matched
        return self._look_again(request, num_computed_tokens) or matched

    def _look_again(self, request: Any, num_computed_tokens: int) -> tuple[None, bool] | None:
        """Return that the answer is not known yet, or None if it is not worth another look-up."""
        adapter, tracker = self.scheduler_adapter, self.request_trackers[request.request_id]
        chunk, ids = adapter.lmcache_tokens_per_chunk, tracker.get_token_ids()
        stored_tokens = (len(ids) - self._reserve_last_token_for_lookup) // chunk * chunk
        found_tokens = tracker.num_lmcache_hit_tokens
        missed_tokens = max(0, stored_tokens - max(found_tokens, num_computed_tokens))
        if not self._late.looks_again(request.request_id, missed_tokens, adapter.is_healthy):
            return None
        if found_tokens:
            key = adapter._create_key(
                ids, 0, found_tokens, request.request_id, tracker.cache_salt,
                tracker.request_configs,
            ).no_worker_id_version()  # fmt: skip
            clients = adapter.req_clients.values()
            freeing = [client.free_lookup_locks(key, adapter.tp_size) for client in clients]
            self._late.frees(request.request_id, freeing)
        adapter.cleanup_lookup_result(request.request_id)
        tracker.num_stored_tokens = tracker.num_lmcache_hit_tokens = 0
        return None, True

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._correct_counts(scheduler_output)
        metadata = super().build_connector_meta(scheduler_output)
        # Workers wait for their stores before this step, in which others may get their blocks.
        preempted = frozenset(scheduler_output.preempted_req_ids or ())
        self._storing -= preempted
        for one in metadata.requests:
            if one.direction == "STORE":
                self._storing.add(one.request_id)
                self._pins.pin(self._step, one.op.block_ids)
            else:
                tracker = self.request_trackers[one.request_id]
                tokens = tracker.num_lmcache_hit_tokens - tracker.num_vllm_hit_tokens
                self._loads.begin(one.request_id, tokens * self._meter.token_s)
        metadata.notes = StepNotes(
            self._step,
            {one: self._to_tell.pop(one) for one in list(self._whole(scheduler_output))},
            self._gone,
            frozenset(self._ended),
            preempted,
            {
                one.request_id: self._images[one.request_id]
                for one in metadata.requests
                if one.request_id in self._images
            },
        )
        self._step += 1
        self._ended.clear()
        self._gone = {}
        self._meter.began(scheduler_output, time.monotonic())
        return metadata

    def _correct_counts(self, scheduler_output: Any) -> None:
        """Have requests that begin count as computed what vLLM has, which is what may be stored.

        LMCacheMPConnector counts what vLLM offered before the look-up. vLLM may begin earlier: in a
        hybrid model where groups of layers agree, or to replay a window of DeepSeek's.
        """
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        begin = [(one.req_id, one.num_computed_tokens) for one in new]
        running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        begin += [one for one in running if one[0] in cached.resumed_req_ids]
        for request_id, tokens in begin:
            tracker = self.request_trackers[request_id]
            hit_tokens = max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)
            tracker.increase_num_scheduled_tokens(
                tokens - hit_tokens - tracker.num_scheduled_tokens
            )

    def _whole(self, scheduler_output: Any) -> Iterator[str]:
        """Yield requests of whose prompts nothing more is stored after this step."""
        chunk = self.scheduler_adapter.lmcache_tokens_per_chunk
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id not in self._to_tell:
                continue
            tracker = self.request_trackers[request_id]
            tokens = tracker.num_prompt_tokens if self._can_store else 0
            if tracker.max_offload_tokens is not None:
                tokens = min(tokens, tracker.max_offload_tokens)
            if tracker.num_stored_tokens >= tokens // chunk * chunk:
                yield request_id

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if hasattr(self, "scheduler_adapter"):
            self._pins.pool = gpu_block_pool

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StoresReport):
            self._pins.release(report.done)
        self._loads.end(connector_output.finished_recving or ())
        # Others have ended while they were loaded.
        self._failed |= connector_output.failed_recving & self.request_trackers.keys()
        super().update_connector_output(connector_output)

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        if not hasattr(self, "scheduler_adapter"):
            failed = failures.take_untold()
            return StepStats({FAILED_IMAGES: failed}) if failed else stats
        told: dict[str, list[Any]] = {}
        if steps := self._meter.ended(time.monotonic()):
            told[STEPS] = [msgspec.structs.astuple(one) for one in steps]
        if overdue := self._loads.overdue():
            told[OVERDUE] = overdue
        return StepStats({**({} if stats is None else stats.data), **told}) if told else stats

    def _report_block_allocation_deltas(self, scheduler_output: Any) -> None:
        """Report nothing: it costs every turn, for metrics of the server's."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether an ended request still needs its blocks for stores, and statistics.

        Without a tracker, which the first look-up makes, LMCacheMPConnector fails on
        ``cached_token_stats`` ("Request tracker ... not found"). So a request aborted before that
        would end the engine.
        """
        self._images.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        self._get_or_create_request_tracker(request)
        _, params = super().request_finished(request, block_ids)
        late, missed_tokens = self._late.over(request.request_id)
        if params and missed_tokens:
            params["cached_token_stats"][MISSED] = missed_tokens
        if params and late:
            params["cached_token_stats"][LATE] = True
        if request.request_id in self._to_tell:
            self._gone[request.request_id] = self._to_tell.pop(request.request_id)
        kept = request.request_id in self._storing
        if kept:
            self._storing.remove(request.request_id)
            self._ended.add(request.request_id)
        return kept, params
