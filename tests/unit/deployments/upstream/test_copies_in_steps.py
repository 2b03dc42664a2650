"""Stores of a worker on a CPU, with LMCache's own adapter and a stub of its server."""

import gc
import pickle
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPConnectorMetadata,
    LMCacheMPRequestMetadata,
    LoadStoreOp,
)
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPWorkerAdapter,
    ParallelStrategy,
)
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import (
    PrepareStoreResponse,
    RegisterEngineDrivenContextResponse,
)
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context

from deployments.engine.stores import StepNotes
from tests.unit.deployments.engine.connectors import worker_half
from tests.unit.deployments.waiting import eventually

BLOCK_TOKENS = 32
# In the place of a time: the connection is lost.
LOST = -1.0


@dataclass
class SlowServer:
    """Where LMCache's server is, at the end of a worker's client: a store takes its time there.

    Args:
        takes_s: by request.

    Attributes:
        stored: what it got, by request.
        unregistered_with: requests of which it had got something when the worker unregistered.
    """

    takes_s: dict[str, float]
    stored: dict[str, Any] = field(default_factory=dict)
    unregistered_with: list[str] = field(default_factory=list)

    def register_kv_cache_engine_driven_context(self, context: Any) -> Any:
        return _answered(RegisterEngineDrivenContextResponse())

    def prepare_store(self, key: Any, instance_id: int) -> Any:
        answer = _unanswered()
        takes_s = self.takes_s[key.request_id]
        if takes_s == LOST:
            answer.set_exception(TimeoutError("lost"))
            return answer
        told = threading.Timer(takes_s, answer.set_result, [PrepareStoreResponse()])
        told.daemon = True
        told.start()
        return answer

    def commit_store(self, key: Any, instance_id: int, chunks: bytes) -> Any:
        self.stored[key.request_id] = pickle.loads(chunks)
        return _answered(True)

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> Any:
        self.unregistered_with = list(self.stored)
        return _answered(None)


def _unanswered() -> Any:
    return MessagingFuture()


def _answered(result: Any) -> Any:
    answer = _unanswered()
    answer.set_result(result)
    return answer


def _worker(server: SlowServer) -> tuple[Any, Any]:
    """A worker's connector with LMCache's own adapter and transfer, and its KV of 16 blocks."""
    blocks = torch.arange(2 * 16 * BLOCK_TOKENS * 8, dtype=torch.float32)
    blocks = blocks.view(2, 16, 1, BLOCK_TOKENS, 8)
    adapter = object.__new__(LMCacheMPWorkerAdapter)
    adapter._health_event = threading.Event()
    adapter._health_event.set()
    adapter._heartbeat, adapter.lazy_offload, adapter._kv_events_enabled = object(), False, False
    adapter._kv_event_server_source = adapter._enable_kv_events = False
    adapter.parallel_strategy = ParallelStrategy(False, 1, 0, 1, 1, 1)
    adapter.model_name, adapter.blocks_in_chunk = "model", 2
    adapter.kv_caches, adapter.engine_group_infos = {"layer.0": blocks}, []
    adapter.store_futures, adapter.store_events, adapter.retrieve_futures = {}, {}, {}
    adapter.finished_stores, adapter.previously_finished = set(), set()
    adapter._returned_finished, adapter._dropped_retrieves = set(), set()
    adapter.dispatcher, adapter.retrieve_events = None, {}
    adapter.transfer_ctx = create_transfer_context(
        adapter.kv_caches, instance_id=1, req_client=server, mode="engine_driven"
    )
    _register(adapter)
    return worker_half(adapter), blocks


def _register(adapter: Any) -> None:
    adapter.transfer_ctx.register(
        adapter.kv_caches, "model", 1, 2, 10.0, layout_hints={"kv_layout": "HND"},
        engine_type=EngineType.VLLM,
    )  # fmt: skip


def _step(connector: Any, number: int, *stores: Any, **notes: Any) -> set[str]:
    """A step of vLLM's runner; requests whose blocks are free after it."""
    metadata = LMCacheMPConnectorMetadata()
    metadata.requests = list(stores)
    metadata.notes = StepNotes(number, **notes)
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.wait_for_save()
    sent, _ = connector.get_finished(set())
    connector.clear_connector_metadata()
    freed: set[str] = sent
    return freed


def _store(name: str, *blocks: int) -> Any:
    tokens = len(blocks) * BLOCK_TOKENS
    return LMCacheMPRequestMetadata(
        name, "STORE", LoadStoreOp([1] * tokens, [list(blocks)], 0, tokens)
    )


def test_a_step_waits_for_its_store() -> None:
    server = SlowServer({"a": 0.3})
    connector, _ = _worker(server)
    begun_s = time.monotonic()
    _step(connector, 0, _store("a", 1, 2))
    assert server.stored
    assert time.monotonic() - begun_s > 0.29


@pytest.mark.usefixtures("patched")
def test_a_store_of_a_second_delays_nobodys_step_and_is_not_written_over() -> None:
    """Others' steps go on; the request's blocks are free, and it is told of, once it is stored."""
    server = SlowServer({"a": 1.0})
    connector, blocks = _worker(server)
    right = blocks[:, [3, 5, 1, 4]].clone()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hears:
        hears.bind("")
        hears.setblocking(False)
        address = [hears.getsockname()[1:].decode(), 7]
        freed = _step(connector, 0, _store("a", 3, 5, 1, 4), whole={"a": address})
        assert not server.stored
        # Its one token was sampled in that step: it is over.
        steps, ended, heard, deadline_s = 0, frozenset("a"), False, time.monotonic() + 30
        while not freed or not heard:
            assert time.monotonic() < deadline_s
            steps += 1
            freed |= _step(connector, steps, ended=ended)
            ended = frozenset()
            if freed:
                # They are others' from now on.
                blocks[:, [3, 5, 1, 4]] = -1.0
            try:
                heard |= bool(hears.recv(64))
            except BlockingIOError:
                time.sleep(0.001)
            else:
                assert server.stored
    # So many steps were done meanwhile; of one that waits for the store there is none.
    assert steps > 5
    chunks = server.stored["a"]
    assert len(chunks) == 2
    for at, chunk in enumerate(chunks):
        # Keys and values, one layer, tokens of two blocks, one head.
        found = chunk.view(2, 2, BLOCK_TOKENS, 8)
        assert bool((found == right[:, 2 * at : 2 * at + 2, 0]).all())


@pytest.mark.usefixtures("patched")
def test_prompts_are_stored_one_after_another() -> None:
    """One that begins like another finds that its beginning is being stored, and is to be told of
    when that is done, too."""
    server = SlowServer({"a": 0.2, "b": 0.0})
    connector, _ = _worker(server)
    told: list[tuple[str, set[str]]] = []
    connector._stores.tell = lambda address: told.append((address[0], set(server.stored)))
    _step(connector, 0, _store("a", 1, 2), _store("b", 3, 4), whole={"a": ["a", 0], "b": ["b", 0]})
    eventually(lambda: len(told) == 2)
    assert dict(told)["b"] == {"a", "b"}
    assert [name for name, _ in told] == ["a", "b"]


@pytest.mark.usefixtures("patched")
def test_a_worker_unregisters_when_its_copies_are_over() -> None:
    server = SlowServer({"a": 0.2, "b": 0.1})
    connector, _ = _worker(server)
    _step(connector, 0, _store("a", 1, 2), _store("b", 3, 4))
    connector.unmap()
    assert server.unregistered_with == ["a", "b"]
    # None begins after that, and the process can end.
    _step(connector, 1, _store("c", 5, 6))
    connector.worker_adapter.transfer_ctx.close()
    assert list(server.stored) == ["a", "b"]


@pytest.mark.usefixtures("patched")
def test_stores_that_wait_while_the_server_restarts_fail() -> None:
    """They would copy to the memory of the run that is gone, and be committed to the next one."""
    server = SlowServer({"a": 0.2, "b": 0.0, "c": 0.0})
    connector, _ = _worker(server)
    adapter = connector.worker_adapter
    before = adapter.transfer_ctx
    _step(connector, 0, _store("a", 1, 2), _store("b", 3, 4))
    adapter.transfer_ctx = create_transfer_context(
        adapter.kv_caches, instance_id=1, req_client=server, mode="engine_driven"
    )
    _register(adapter)
    _step(connector, 1, _store("c", 5, 6))
    eventually(lambda: not connector._stores.under_way("a"))
    eventually(lambda: not connector._stores.under_way("c"))
    before.close()
    assert not connector._stores.under_way("b")
    assert sorted(server.stored) == ["a", "c"]


@pytest.mark.usefixtures("patched")
def test_the_memory_of_a_run_that_is_gone_is_given_up_though_calls_to_it_failed() -> None:
    """Of such calls LMCache keeps exceptions, with the frames that raised them."""
    connector, _ = _worker(SlowServer({"a": LOST}))
    adapter = connector.worker_adapter
    memory = weakref.ref(adapter.transfer_ctx.engine_driven_context)
    gc.disable()
    try:
        _step(connector, 0, _store("a", 1, 2))
        eventually(lambda: not connector._stores.under_way("a"))
        adapter.transfer_ctx = create_transfer_context(
            adapter.kv_caches, instance_id=1, req_client=SlowServer({}), mode="engine_driven"
        )
        eventually(lambda: memory() is None)
    finally:
        gc.enable()
