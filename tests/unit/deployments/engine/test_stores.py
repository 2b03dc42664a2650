"""What is stored beside the steps that follow: nobody waits, and nothing is written over."""

import pickle
import random
import socket
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.deployments.engine.scheduler.stand_in import words
from tests.unit.deployments.engine.storing import CHUNK_TOKENS, Storing


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_turns_are_stored_as_they_were_computed(
    seed: int, window: bool, two_in_flight: bool
) -> None:
    """With preemptions, prompts that begin alike, clients that leave, and hardly any room."""
    chance = random.Random(seed)
    engine = Storing(blocks=52, takes_steps=4, window=window, two_in_flight=two_in_flight)
    shared = words(chance, 200)
    asked: dict[str, int] = {}
    left = set()
    for number in range(60):
        name = f"r{number}"
        prompt = shared[: chance.choice((0, 0, 100, 200))]
        prompt += words(chance, chance.randrange(20, 600))
        engine.store(name, prompt, max_tokens=chance.choice((1, 1, 40, 250)))
        asked[name] = len(prompt)
        for _ in range(chance.randrange(5)):
            engine.step()
        if engine.live and chance.random() < 0.15:
            gone = chance.choice(sorted(engine.live))
            engine.abort(gone)
            left.add(gone)
    engine.drain()
    for _ in range(20):
        engine.step()
    assert not engine.wrong
    assert engine.preempted
    assert not engine.spoiled
    stored = {}
    for copy in engine.copies:
        assert copy.done
        stored[copy.request_id] = True
    assert stored.keys() >= {
        one for one, tokens in asked.items() if tokens >= CHUNK_TOKENS and one not in left
    }
    _eventually(lambda: {one for one, _ in engine.told} >= asked.keys() - left)
    assert len(engine.told) == len({one for one, _ in engine.told})
    assert all(done for _, done in engine.told)
    assert not engine.front._to_tell
    assert not engine.front._pins._pinned
    engine.require_no_leak()


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_prompts_whose_loads_fail_are_stored_as_they_were_computed(
    seed: int, two_in_flight: bool
) -> None:
    """Behind a beginning that the engine has, and where a step ends within a block."""
    chance = random.Random(seed)
    engine = Storing(blocks=160, takes_steps=1, two_in_flight=two_in_flight)
    shared = words(chance, 320)
    loaded = 0
    for number in range(80):
        name = f"r{number}"
        own = words(chance, chance.randrange(20, 900))
        prompt = shared[: chance.choice((0, 100, 320))] + own
        chunks = min(len(prompt), 640) // CHUNK_TOKENS
        engine.found_tokens[name] = chance.randrange(chunks + 1) * CHUNK_TOKENS
        if chance.random() < 0.6:
            engine.fail.add(name)
        engine.store(name, prompt, max_tokens=chance.choice((1, 40)))
        for _ in range(chance.randrange(5)):
            engine.step()
        loaded += len(engine.loads)
    engine.drain()
    for _ in range(20):
        engine.step()
    assert loaded
    assert not engine.wrong
    assert not engine.spoiled
    engine.require_no_leak()


def _eventually(holds: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


# --- as a worker on a CPU stores ------------------------------------------------------------------

BLOCK_TOKENS = 32


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
        from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextResponse

        return _answered(RegisterEngineDrivenContextResponse())

    def prepare_store(self, key: Any, instance_id: int) -> Any:
        from lmcache.v1.multiprocess.custom_types import PrepareStoreResponse

        answer = _unanswered()
        takes_s = self.takes_s[key.request_id]
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
    from lmcache.v1.multiprocess.futures import MessagingFuture

    return MessagingFuture()


def _answered(result: Any) -> Any:
    answer = _unanswered()
    answer.set_result(result)
    return answer


def _worker(server: SlowServer) -> tuple[Any, Any]:
    """A worker's connector with LMCache's own adapter and transfer, and its KV of 16 blocks."""
    import torch
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPWorkerAdapter,
        ParallelStrategy,
    )
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context

    from deployments.engine.lmcache_client import Connection
    from deployments.engine.lmcache_connector import ResilientMPConnector
    from deployments.engine.stores import copy_beside_steps

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
    copy_beside_steps()
    adapter.transfer_ctx = create_transfer_context(
        adapter.kv_caches, instance_id=1, req_client=server, mode="engine_driven"
    )
    _register(adapter)
    connector = object.__new__(ResilientMPConnector)
    connector.worker_adapter, connector.lazy_offload, connector.dispatcher = adapter, False, None
    connector._can_store, connector._connector_metadata = True, None
    connector._prepare_worker(Connection(threading.Event()))
    return connector, blocks


def _register(adapter: Any) -> None:
    from lmcache.utils import EngineType

    adapter.transfer_ctx.register(
        adapter.kv_caches, "model", 1, 2, 10.0, layout_hints={"kv_layout": "HND"},
        engine_type=EngineType.VLLM,
    )  # fmt: skip


def _step(connector: Any, number: int, *stores: Any, **notes: Any) -> set[str]:
    """A step of vLLM's runner; requests whose blocks are free after it."""
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPConnectorMetadata

    from deployments.engine.stores import StepNotes

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
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata, LoadStoreOp

    tokens = len(blocks) * BLOCK_TOKENS
    return LMCacheMPRequestMetadata(
        name, "STORE", LoadStoreOp([1] * tokens, [list(blocks)], 0, tokens)
    )


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


def test_prompts_are_stored_one_after_another() -> None:
    """One that begins like another finds that its beginning is being stored, and is to be told of
    when that is done, too."""
    server = SlowServer({"a": 0.2, "b": 0.0})
    connector, _ = _worker(server)
    told: list[tuple[str, set[str]]] = []
    connector._stores.tell = lambda address: told.append((address[0], set(server.stored)))
    _step(connector, 0, _store("a", 1, 2), _store("b", 3, 4), whole={"a": ["a", 0], "b": ["b", 0]})
    _eventually(lambda: len(told) == 2)
    assert dict(told)["b"] == {"a", "b"}
    assert [name for name, _ in told] == ["a", "b"]


# --- blocks that a request gives up before it ends ------------------------------------------------


def test_groups_that_give_up_blocks_are_those_without_full_attention() -> None:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    from deployments.engine.stores import groups_that_give_up

    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
    specs = [
        full,
        window,
        MLAAttentionSpec(**shape),
        ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64),
        MambaSpec(block_size=32, shapes=((1,),), dtypes=(torch.float32,)),
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": full, "b": full}),
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": window, "b": window}),
    ]
    config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], one) for one in specs])
    assert groups_that_give_up(config) == (1, 3, 4, 6)
    assert groups_that_give_up(None) == ()


def test_what_one_worker_has_not_stored_stays_pinned() -> None:
    from deployments.engine.stores import StoresReport

    assert StoresReport(4).aggregate(StoresReport(2)) == StoresReport(2)


def test_an_engine_without_other_work_goes_on_until_its_blocks_are_free() -> None:
    """Else they would stay pinned until another request comes."""
    engine = Storing(blocks=52, takes_steps=8, window=True)
    engine.store("r", words(random.Random(0), 300), max_tokens=1)
    engine.drain()
    steps = 0
    while engine.scheduler.has_requests():
        engine.step()
        steps += 1
        assert steps < 100
    assert all(copy.done for copy in engine.copies)
    engine.require_no_leak()


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


def test_stores_that_wait_while_the_server_restarts_fail() -> None:
    """They would copy to the memory of the run that is gone, and be committed to the next one."""
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context

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
    _eventually(lambda: not connector._stores.under_way("a"))
    _eventually(lambda: not connector._stores.under_way("c"))
    before.close()
    assert not connector._stores.under_way("b")
    assert sorted(server.stored) == ["a", "c"]
