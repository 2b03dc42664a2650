"""LMCache's connector for vLLM, made to outlive its server.

LMCacheMPConnector as it comes waits for a dead server for up to its message timeout in every
engine step, never registers again after a quick restart, and lets a failed store end the engine.
Here a lost connection is noticed when it breaks, whatever was under way fails at once (vLLM then
recomputes, by ``kv_load_failure_policy``), and heartbeats, which bring the connection back, run
from the start. A server that is only busy is not taken for lost. What a broken-off forward pass
left behind is not stored. A request that is aborted before it was looked up does not end the
engine, nor does one for its prompt's log-probabilities. Prompts of embeddings, which no key tells
apart, are neither stored nor loaded. Later turns, which find their history in the decoder's own
cache, do not ask the server. And a decoder stores prompts that it is told to park, and no others.

Keys are made of the ``cache_salt`` and of token ids, where each placeholder of an image (or other
media) is replaced by a value of that item's hash (``LMCacheMPRequestTracker.get_token_ids``).

It reaches into internals of lmcache 0.5.6 (``_message_queue_client``, ``pending_futures``,
``_health_event``, ``_ensure_heartbeat_started``, ``_can_store``, the request trackers): check it
when that version changes.
"""

import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.futures import MessagingFuture

from conserve.wire import PARK, STORED_TOKENS
from deployments.node import kv_pool
from deployments.node.lmcache_server import START_TIMEOUT_S

logger = init_logger(__name__)

# The requests that bring a connection back, and so must pass while it is down.
_ALWAYS = (
    "ping",
    "get_chunk_size",
    "get_experimental",
    "register_kv_cache",
    "register_kv_cache_engine_driven_context",
)
_STORE_TIMEOUT_S = 30.0
# LMCache waits for a heartbeat's answer as long as it waits between two of them.
_PING_TIMEOUT_S = 5.0
_LOOKS_EVERY_S = 0.5


class ResilientMPConnector(LMCacheMPConnector):  # type: ignore[misc]  # LMCache ships no types.
    """vLLM makes one in its scheduler and one in each worker, by name."""

    # A decoder, which stores what it is told to.
    _parks = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        _wait_for_server(urlsplit(extra["lmcache.mp.host"]).hostname, extra["lmcache.mp.port"])
        kv_pool.accept()
        super().__init__(vllm_config, *args, **kwargs)
        self._parks = vllm_config.kv_transfer_config.kv_role == "kv_both"
        # Stores that are not waited for any more.
        self._not_stored: set[MessagingFuture[Any]] = set()
        if hasattr(self, "scheduler_adapter"):
            adapter = self.scheduler_adapter
            for url, client in adapter.req_clients.items():
                _fail_fast(client, adapter._health_events[url])
                _be_patient(client)
            adapter._ensure_heartbeat_started()
        else:
            _fail_fast(self.worker_adapter.req_client, self.worker_adapter._health_event)
            _be_patient(self.worker_adapter.req_client)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Also start the heartbeat, which otherwise waits for a first request."""
        super().register_kv_caches(kv_caches)
        self.worker_adapter._ensure_heartbeat_started()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the decoder's own can be loaded, and whether asynchronously.

        Where all that LMCache may hold is in the decoder's own cache already, and nothing is to be
        stored, the answer is known without two round trips to the server, and without locking the
        chunks of a long history.

        A request that has to compute its whole prompt, for the log-probabilities of its tokens,
        loads nothing. LMCacheMPConnector 0.5.6 does load, and vLLM 0.29 fails on the positions
        that were not computed ("number too small to fit in target type"), which ends the engine.

        Of a prompt with embeddings nothing is loaded or stored: whatever they are, each counts as
        token 0 in the keys of LMCache 0.5.6.
        """
        if request.prompt_embeds is not None:
            self._get_or_create_request_tracker(request).max_offload_tokens = 0
            return 0, False
        if request.skip_reading_prefix_cache:
            tracker = self._get_or_create_request_tracker(request)
            if self._parks:
                tracker.max_offload_tokens = 0
            return 0, False
        params = request.kv_transfer_params or {}
        stores = self._can_store and (not self._parks or bool(params.get(PARK)))
        # A store has to know what the server holds, or it stores it again.
        if not stores:
            tracker = self._get_or_create_request_tracker(request)
            tracker.max_offload_tokens = 0
            stored_tokens = params.get(STORED_TOKENS)
            chunk = self.scheduler_adapter.lmcache_tokens_per_chunk
            # A look-up that is under way has to be brought to its end.
            if (
                stored_tokens is not None
                and tracker.lookup_started_at is None
                and num_computed_tokens >= stored_tokens // chunk * chunk
            ):
                # cached_token_stats takes it from there; super() would set it too.
                alignment = self._hit_alignment_tokens
                tracker.num_vllm_hit_tokens = num_computed_tokens // alignment * alignment
                return 0, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, however it did; whether its blocks are still needed, and statistics.

        LMCacheMPConnector 0.5.6 makes a tracker when the scheduler looks a request up, and fails
        without one where ``cached_token_stats`` are asked for ("Request tracker ... not found"). So
        a request that is aborted while it waits for its first look-up would end the engine. At any
        later moment there is a tracker: during the look-up, while KV is loaded or stored, and after
        a preemption, which keeps it until the next look-up.
        """
        self._get_or_create_request_tracker(request)
        sends, params = super().request_finished(request, block_ids)
        return sends and not self._parks, params

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are needed no more, for a store or a load.

        A decoder's are free as they end, since `wait_for_save` has waited for their stores. For
        LMCacheMPConnector 0.5.6 whoever may store delays all of them: of a request that is aborted
        while it loads, vLLM 0.29 would then be told of two ends, and fail on the second.
        """
        ended: tuple[set[str] | None, set[str] | None]
        ended = super().get_finished(set() if self._parks else finished_req_ids)
        if self._parks:
            # Kept for who asks; nobody will.
            self.worker_adapter.finished_stores.clear()
        return ended

    def wait_for_save(self) -> None:
        """Return when this step's KV is stored, so that the decoder's look-up finds all of it.

        On a CPU stores are synchronous already; on CUDA they are not. A lost store costs a
        recomputation and must not cost the engine.

        vLLM calls this from a ``finally``, so also when the forward pass was broken off, by a
        SIGTERM for instance. What is in the blocks then is not the prompt's KV, and storing it
        would give every later conversation with this prompt wrong answers.
        """
        if sys.exc_info()[0] is not None:
            return
        try:
            super().wait_for_save()
            stores = list(self.worker_adapter.store_futures.values())
            self._not_stored.intersection_update(stores)
            for future in stores:
                if future not in self._not_stored:
                    self._wait_for_store(future)
        except Exception:
            logger.exception("KV was not stored; it will be computed again where it is needed")

    def _wait_for_store(self, future: "MessagingFuture[Any]") -> None:
        """Return when it is stored, or will not be: the server is lost, or does not answer."""
        deadline_s = time.monotonic() + _STORE_TIMEOUT_S
        while not future.wait(_LOOKS_EVERY_S):
            if not self.worker_adapter.is_healthy or time.monotonic() >= deadline_s:
                # Every step would wait for it again.
                self._not_stored.add(future)
                logger.warning("KV was perhaps not stored: there is no answer from LMCache")
                return


def _wait_for_server(host: str | None, port: int, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return when something listens there: the server starts while the engine loads.

    Raises:
        RuntimeError: nothing listens there in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host or "", port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise RuntimeError(
                    f"no LMCache server at {host}:{port} after {timeout_s:g} s ({error}); see the "
                    "node actor's log"
                ) from None
        time.sleep(0.1)


def _fail_fast(client: Any, healthy: Any) -> None:
    """End every open call when the connection is lost, and refuse new ones until it is back."""
    queue = client._message_queue_client
    submit, cancel_streams = queue.submit_request, queue.cancel_streams
    lost = TimeoutError("the connection to the LMCache server is lost")

    def connection_lost() -> None:
        # Called in the thread that owns pending_futures.
        healthy.clear()
        for future, _ in queue.pending_futures.values():
            future.set_exception(lost)
        queue.pending_futures.clear()
        cancel_streams()

    def submit_request(operation: str, payloads: Any) -> Any:
        if healthy.is_set() or operation in _ALWAYS:
            return submit(operation, payloads)
        future = MessagingFuture()
        future.set_exception(lost)
        return future

    queue.cancel_streams = connection_lost
    queue.submit_request = submit_request


def _be_patient(client: Any) -> None:
    """Have heartbeats wait longer for their answers.

    A server that moves KV on a busy machine may take more than a second for one. Taken for lost,
    it would be asked for nothing until the next heartbeat, and first prompts computed twice. Where
    it is lost, the connection breaks, which ends the wait.
    """
    ping = client.ping

    def patient_ping(instance_id: int | None) -> Any:
        answer = ping(instance_id)
        result = answer.result
        answer.result = lambda timeout=None: result(max(timeout or 0.0, _PING_TIMEOUT_S))
        return answer

    client.ping = patient_ping
