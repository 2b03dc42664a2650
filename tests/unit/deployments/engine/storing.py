"""An engine whose prompts are stored beside its steps, without a model and without a server.

vLLM's real scheduler and both halves of the connector play; what stands in is the memory that KV is
in, which steps write to, and LMCache's server, which reads it some steps after it was asked to, and
fills it, or fails to, with KV that it is said to have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput

from conserve import wire
from deployments.engine.stores import groups_that_give_up
from tests.unit.deployments.engine.connectors import scheduler_half, worker_half
from tests.unit.deployments.engine.stepping import BLOCK_TOKENS, SteppedEngine

CHUNK_TOKENS = 64
# Of the layers that have one: a request gives up blocks that are further back.
WINDOW_TOKENS = 96


@dataclass
class Copy:
    """A store: what is to be read, when, and what has to be there."""

    request_id: str
    due: int
    # Block, slot, and what has to be in it.
    reads: list[tuple[int, int, Any]]
    done: bool = False

    def query(self) -> bool:
        return self.done

    def result(self, timeout: float) -> bool:
        return self.done


@dataclass
class Storing(SteppedEngine):
    """An engine that stores every prompt.

    Args:
        takes_steps: a store reads so many steps after it has begun.
        window: whether there is a layer with a sliding window.
        found_tokens: what the server has of a prompt, by request.
        fail: requests whose loads fail.

    Attributes:
        spoiled: what was read from memory and was not what the request had computed.
        told: whose prompts were said to be stored, and whether they were.
        loaded: requests whose loads have begun, each time.
    """

    takes_steps: int = 3
    window: bool = False
    found_tokens: dict[str, int] = field(default_factory=dict)
    fail: set[str] = field(default_factory=set)
    copies: list[Copy] = field(default_factory=list)
    spoiled: list[Any] = field(default_factory=list)
    told: list[tuple[str, bool]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory: dict[tuple[int, int], Any] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._tokens: dict[str, Any] = {}
        # Loads that have begun: what of, and when each is over.
        self.loads: dict[str, tuple[Any, int]] = {}
        self.front, self.back = self._connector()
        self.scheduler.connector = self.front
        self.front.bind_gpu_block_pool(self.pool)

    def _groups(self) -> list[Any]:
        groups = super()._groups()
        if self.window:
            spec = SlidingWindowSpec(
                block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32,
                sliding_window=WINDOW_TOKENS,
            )  # fmt: skip
            groups.append(KVCacheGroupSpec(["window"], spec))
        return groups

    def _connector(self) -> tuple[Any, Any]:
        """The scheduler's half, and the worker's."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        give_up = groups_that_give_up(SimpleNamespace(kv_cache_groups=groups))
        assert len(give_up) == self.window
        several = len(groups) > 1
        front = scheduler_half(
            _Found(self.found_tokens),
            block_tokens=BLOCK_TOKENS,
            give_up=give_up,
            _can_store=True,
            _group_tokens_per_block=[BLOCK_TOKENS] * len(groups),
            _report_request_errors=several,
        )
        back = worker_half(self, reports=bool(give_up))
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True))
        for half, role in ((front, KVConnectorRole.SCHEDULER), (back, KVConnectorRole.WORKER)):
            KVConnectorBase_V1.__init__(half, config, role, self.scheduler.kv_cache_config)
        back._stores.tell = self._hear
        # Time goes by for who waits, and nothing else.
        back._stores.sleep = lambda _: self._copy(lambda copy: True)
        return front, back

    def _hear(self, address: Any) -> None:
        name, _ = address
        stored = [copy.done for copy in self.copies if copy.request_id == name]
        self.told.append((name, all(stored)))

    def store(self, name: str, tokens: Sequence[int], max_tokens: int) -> Any:
        """Add a request that waits until its prompt is stored."""
        request = self.add(name, tokens, max_tokens)
        request.kv_transfer_params = {**wire.transfer_params(park=True), wire.STORED_TO: [name, 0]}
        return request

    def settle(self) -> None:
        """Step until nothing runs any more, and until the last stores are told of."""
        self.drain(5000)
        for _ in range(20):
            self.step()

    # --- LMCache's adapter, of the worker ---------------------------------------------------------

    is_healthy = True
    transfer_ctx = None

    def create_recorded_event(self) -> None:
        return None

    def batched_submit_store_requests(
        self, request_ids: list[str], ops: list[Any], event: None, **more: Any
    ) -> None:
        self.store_futures, self.store_events = {}, {}
        for request_id, op in zip(request_ids, ops, strict=True):
            copy = Copy(request_id, self.steps + self.takes_steps, list(self._reads(op)))
            self.copies.append(copy)
            self.store_futures[request_id] = copy

    store_futures: dict[str, Any] = field(default_factory=dict)
    store_events: dict[str, Any] = field(default_factory=dict)

    def batched_submit_retrieve_requests(
        self, request_ids: list[str], ops: list[Any], event: None, **more: Any
    ) -> None:
        for request_id, op in zip(request_ids, ops, strict=True):
            self.loads[request_id] = op, self.steps + self.takes_steps
            self.loaded.append(request_id)
            self.retrieve_futures[request_id] = SimpleNamespace(query=bool), op.flat_block_ids

    retrieve_futures: dict[str, Any] = field(default_factory=dict)
    error_block_ids: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def get_finished(self, ids: set[str]) -> tuple[set[str], set[str]]:
        over = {one for one, (_, due) in self.loads.items() if due <= self.steps}
        for request_id in over:
            op, _ = self.loads.pop(request_id)
            _, block_ids = self.retrieve_futures.pop(request_id)
            if request_id in self.fail:
                self.error_block_ids.update(block_ids)
                self.failed.add(request_id)
                continue
            for group, block_ids in enumerate(op.block_ids):
                for position in range(op.start + op.skip_first_n_tokens, op.end):
                    block = block_ids[(position - op.start) // BLOCK_TOKENS]
                    loaded = (group, position, op.token_ids[position])
                    self.memory[block, position % BLOCK_TOKENS] = loaded
        return set(), over

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.error_block_ids, self.failed = self.error_block_ids, set(), set()
        return failed

    def get_failed_request_ids(self) -> set[str]:
        failed, self.error_block_ids, self.failed = self.failed, set(), set()
        return failed

    def _reads(self, op: Any) -> Iterator[tuple[int, int, Any]]:
        for group, block_ids in enumerate(op.block_ids):
            for position in range(op.start, op.end):
                chunk_end = position // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS
                # LMCache reads no more of a chunk than a window has.
                if group and position < chunk_end - min(CHUNK_TOKENS, WINDOW_TOKENS):
                    continue
                block = block_ids[(position - op.start) // BLOCK_TOKENS]
                # vLLM's null block: of a prefix in the cache only the window's end is there.
                if not block:
                    continue
                yield block, position % BLOCK_TOKENS, (group, position, op.token_ids[position])

    # --- the model's runner -----------------------------------------------------------------------

    def _connector_output(self, output: Any) -> Any:
        back, metadata = self.back, output.kv_connector_metadata
        # As time goes by, before this step may write anything.
        self._copy(lambda copy: copy.due <= self.steps)
        back.handle_preemptions(metadata)
        back.bind_connector_metadata(metadata)
        self._compute(output)
        back.start_load_kv(None)
        back.wait_for_save()
        results = back.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=back.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=back.build_connector_worker_meta(),
        )
        back.clear_connector_metadata()
        return said

    def _compute(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        starts = {}
        for one in output.scheduled_new_reqs:
            self._tables[one.req_id] = [list(ids) for ids in one.block_ids]
            starts[one.req_id] = one.num_computed_tokens
        for request_id, ids, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(one) for one in ids]
            elif ids is not None:
                for table, more in zip(self._tables[request_id], ids, strict=True):
                    table += more
            starts[request_id] = start
        for request_id, tokens in output.num_scheduled_tokens.items():
            known = self._known(request_id)
            for position in range(starts[request_id], starts[request_id] + tokens):
                token = known[position] if position < len(known) else position
                for group, table in enumerate(self._tables[request_id]):
                    block = table[position // BLOCK_TOKENS]
                    self.memory[block, position % BLOCK_TOKENS] = (group, position, token)

    def _known(self, request_id: str) -> Sequence[int]:
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self._tokens[request_id] = request.prompt_token_ids
        known: Sequence[int] = self._tokens[request_id]
        return known

    def _copy(self, which: Any) -> None:
        for copy in [one for one in self.copies if not one.done and which(one)]:
            for block, slot, right in copy.reads:
                if (found := self.memory.get((block, slot))) != right:
                    self.spoiled.append((copy.request_id, right, found))
            copy.done = True


@dataclass
class _Found:
    """LMCache's adapter of the scheduler, whose look-ups are answered at once."""

    found_tokens: dict[str, int]

    lmcache_tokens_per_chunk = CHUNK_TOKENS

    def maybe_submit_lookup_request(self, request_id: str, **asked: Any) -> None:
        pass

    def check_lookup_result(self, request_id: str) -> int:
        return self.found_tokens.get(request_id, 0)

    def cleanup_lookup_result(self, request_id: str) -> None:
        pass

    def free_lookup_locks(self, **of: Any) -> None:
        pass

    def end_session(self, request_id: str) -> None:
        pass
