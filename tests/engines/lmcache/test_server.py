"""LMCache's own server, and those that it serves: who dies, who is only silent, and who is early.

Workers are processes without a model. In the mode ``lmcache_driven`` the server copies from and to
their memory, and announces what it has after that, as it does on GPUs.
"""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from conserve import wire
from conserve.settings import Settings
from deployments.engine.copies import Copies
from deployments.kv_identity import KV_SETTINGS, cache_name, of_settings
from deployments.node.lmcache_main import HEALTH_PATH
from deployments.node.lmcache_server import (
    Address,
    LMCacheServer,
    free_port,
    lmcache_environment,
)
from tests.engines.lmcache import engine as bare_engine
from tests.engines.lmcache import slow
from tests.engines.lmcache import worker as bare_worker
from tests.engines.lmcache.worker import CHUNK_TOKENS, MODEL
from tests.engines.waiting import eventually

_SHARED = Path("/dev/shm")
MODES = ("engine_driven", "lmcache_driven")


@dataclass
class Server:
    """A server that runs, and workers of it."""

    address: Address
    workers: list["Worker"]

    def worker(self, mode: str, *more: str) -> "Worker":
        """Start one; it has registered. ``more`` is its model's name, and its KV's type."""
        worker = Worker(bare_worker.__name__, self.address.port, mode, *more)
        self.workers.append(worker)
        worker.id = int(worker.answer())
        return worker

    def registered(self) -> list[int]:
        """Workers whose memory it knows."""
        status = json.dumps(self._get("status"))
        return [one.id for one in self.workers if str(one.id) in status]

    def engines(self) -> int:
        """How many have registered, whoever they are."""
        return len(_found(self._get("status"), "registered_non_cuda_instance_ids"))

    def chunks(self) -> int:
        """How many chunks it has."""
        return int(_found(self._get("status"), "total_object_count"))

    async def found(self, ids: list[int], model: str = MODEL) -> int:
        """How many of a prompt's chunks it has."""
        body = {"model_name": model, "world_size": 1, "token_ids": ids}
        request = self._get("cache/prefetches", json.dumps(body).encode())["request_id"]
        status: dict[str, Any] = {}

        def over() -> bool:
            status.update(self._get(f"cache/prefetches/{request}"))
            return status["status"] == "completed"

        await eventually("the prefetch is over", over)
        return int(status["found_keys"])

    def up(self) -> bool:
        try:
            self._get(HEALTH_PATH[1:])
        except OSError:
            return False
        return True

    def _get(self, path: str, body: bytes | None = None) -> Any:
        url = f"http://127.0.0.1:{self.address.http_port}/{path}"
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(asked, timeout=5))


def _found(status: Any, name: str) -> Any:
    """The first member of that name, at whatever depth."""
    if not isinstance(status, dict):
        return None
    if name in status:
        return status[name]
    members = (_found(member, name) for member in status.values())
    return next((member for member in members if member is not None), None)


class Worker:
    """A worker's process, or an engine's."""

    def __init__(self, module: str, port: int, *more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(port), *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        # What the server knows it by, once it has registered.
        self.id = 0

    def do(self, *line: object) -> str:
        assert self.process.stdin is not None
        print(*line, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        # Logs go there, too.
        for line in self.process.stdout:
            if line.startswith(bare_worker.SAYS):
                return line.removeprefix(bare_worker.SAYS).strip()
        raise AssertionError("the worker has ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server(machine_alone: None, request: pytest.FixtureRequest) -> Iterator[Server]:
    size_gb = getattr(request, "param", 0.2)
    address = Address("127.0.0.1", free_port("127.0.0.1"), free_port("127.0.0.1"))
    before = set(_SHARED.iterdir())
    process = subprocess.Popen(
        LMCacheServer(size_gb, CHUNK_TOKENS, address, gpu=False).command(),
        env=lmcache_environment(), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    server = Server(address, [])
    try:
        deadline_s = time.monotonic() + 180
        while not server.up():
            assert time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.2)
        yield server
    finally:
        for worker in server.workers:
            worker.kill()
        process.terminate()
        process.communicate()
        # On CPUs this mode has workers' KV in files there, which those that are killed leave.
        for file in set(_SHARED.glob("lmcache_kv_*")) - before:
            file.unlink()


@pytest.mark.parametrize("mode", MODES)
async def test_a_dead_workers_memory_is_let_go_of_and_a_silent_ones_is_not_lost(
    server: Server, mode: str
) -> None:
    ends, killed, silent = (server.worker(mode) for _ in range(3))
    assert server.registered() == [ends.id, killed.id, silent.id]
    # An orderly end is heard of at once, but for copies to memory that would be another's.
    copies = mode == "engine_driven"
    if copies:
        ends.do("begin", "whole", 400)
    assert ends.do("end") == ("copied" if copies else "done")
    assert server.registered() == [killed.id, silent.id]
    kept = 3 if copies else 0
    assert server.chunks() == kept
    if copies:
        killed.do("begin", "prompt", 400)
        assert server.chunks() == kept + 3
    killed.kill()
    await eventually("the killed one is missed", lambda: server.registered() == [silent.id], 90)
    await eventually("half of its prompt is no prefix", lambda: server.chunks() == kept)
    # One that was missed by mistake, as if it were dead: the server takes nothing from it any more.
    _forget(server, silent.id, mode)
    assert server.registered() == []
    silent.do("sleep")
    await eventually("it registers again", lambda: server.registered() == [silent.id])
    assert silent.do("store", "prompt", 400) == "True"
    assert server.chunks() == kept + 3


async def test_an_engine_that_ends_has_its_memory_let_go_of(server: Server) -> None:
    """The engine's core, and its worker, are processes of vLLM's own."""
    engine = Worker(bare_engine.__name__, server.address.port)
    server.workers.append(engine)
    assert engine.answer() == "ready"
    assert server.engines() == 1
    assert engine.do("prefill") == "done"
    # Three chunks of 400 tokens, which are stored beside the steps that follow.
    await eventually("the prompt is stored", lambda: server.chunks() == 3)
    assert engine.do("shutdown") == "done"
    assert server.engines() == 0
    # What it stored stays.
    assert server.chunks() == 3


async def test_a_slow_store_delays_nobody_and_is_done_when_it_is_said_to_be(
    server: Server, tmp_path: Path
) -> None:
    """On an engine that puts out another request's tokens meanwhile."""
    notes = tmp_path / "stores"
    engine = Worker(slow.__name__, server.address.port, str(notes))
    server.workers.append(engine)
    assert engine.answer() == "ready"
    seen = json.loads(engine.do("beside"))
    times_s = dict(line.split() for line in notes.read_text().splitlines())
    began_s, ended_s = float(times_s["began"]), float(times_s["ended"])
    assert ended_s - began_s >= slow.TAKES_S
    # The prompt's own step is over by then; a step that waits for the store puts out nothing.
    meanwhile = [one for one in seen["others_s"] if began_s < one < ended_s]
    assert len(meanwhile) >= 2
    assert seen["answered_s"] >= ended_s
    assert server.chunks() == 3
    # What was stored is what was computed, and found at the first look.
    assert (seen["found"], seen["late"], seen["same"]) == (384, False, True)


@pytest.mark.parametrize("server", [0.02], indirect=True)
async def test_what_is_touched_outlives_what_was_stored_later(server: Server) -> None:
    config = engine_config()
    name = cache_name(MODEL, config)
    worker = server.worker("engine_driven", name)
    copies = Copies(f"http://127.0.0.1:{server.address.http_port}", config, 10_000, CHUNK_TOKENS)
    # A worker's prompts differ by the lengths of their names.
    tokens = 15 * CHUNK_TOKENS
    copies.keep("waits", [1] * tokens, "")
    for length in range(1, 71):
        assert worker.do("store", "x" * length, tokens) == "True"
        if length % 5 == 0:
            await copies.touch(["waits", "unknown"])
        # It evicts once a second.
        await asyncio.sleep(0.2)
    found = [await server.found([length] * tokens, name) for length in (1, 2, 3, 70)]
    assert found == [15, 0, 0, 15]
    # Nothing is left locked, or waits for an answer.
    await copies.touch(["waits"])
    assert len(copies._open) == 1


async def test_kv_of_another_configuration_is_not_found(server: Server) -> None:
    """A server outlives deployments, and LMCache's keys say nothing of dtypes or weights."""
    before, after = (cache_name(MODEL, engine_config(dtype)) for dtype in ("bfloat16", "float16"))
    for name in (MODEL, before):
        assert server.worker("engine_driven", name).do("store", "prompt", 400) == "True"
    # LMCache's own name: KV of one type is found, and would be read as the other.
    server.worker("engine_driven", MODEL, "float16")
    assert await server.found([6] * 400) == 3
    server.worker("engine_driven", after, "float16")
    assert await server.found([6] * 400, before) == 3
    assert await server.found([6] * 400, after) == 0


def engine_config(dtype: str = "bfloat16") -> Any:
    """Return the parts of an engine's configuration that name its KV."""
    settings = Settings(engine={"dtype": dtype})
    extra = {KV_SETTINGS: of_settings(settings, gpu=False)}
    return SimpleNamespace(
        model_config=SimpleNamespace(model=MODEL, use_mla=False),
        parallel_config=SimpleNamespace(world_size=1, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
    )


def _forget(server: Server, instance_id: int, mode: str) -> None:
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    url = f"tcp://127.0.0.1:{server.address.port}"
    client = RequestClientFactory.create(url, context=zmq.Context.instance())
    if mode == "engine_driven":
        client.unregister_kv_cache_engine_driven_context(instance_id).result(30)
    else:
        client.unregister_kv_cache(instance_id).result(30)
    client.close()


@pytest.fixture
def decoder(server: Server) -> Iterator[tuple[Any, Callable[[float], None]]]:
    """A decoder's connector, as its scheduler has it, and what moves its clock."""
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPSchedulerAdapter,
        ParallelStrategy,
    )

    from conserve.late_kv import LateKV
    from tests.unit.deployments.engine.connectors import scheduler_half

    connector = scheduler_half(None, block_tokens=CHUNK_TOKENS)
    now_s = 0.0

    def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    connector._late = LateKV(lambda: now_s)
    adapter = LMCacheMPSchedulerAdapter(
        [f"tcp://127.0.0.1:{server.address.port}"],
        zmq.Context.instance(),
        MODEL,
        CHUNK_TOKENS,
        ParallelStrategy(False, 1, 0, 1, 1, 1),
        extra_config=bare_worker.options("auto"),
    )
    connector.scheduler_adapter = adapter
    yield connector, advance
    adapter.shutdown()


@pytest.mark.parametrize("mode", MODES)
async def test_a_decoder_that_asks_early_finds_what_is_announced_late(
    server: Server, decoder: tuple[Any, Callable[[float], None]], mode: str
) -> None:
    """And without the word that it is stored, it takes it that there is nothing."""
    connector, advance = decoder
    prefiller = server.worker(mode)
    for name, prefilled in (("told", True), ("untold", False)):
        request = _request(name, 400, prefilled)
        matched = await _matched(connector, request)
        # The prefiller's prompt has its last chunk when the first look-up is over.
        assert prefiller.do("store", request.request_id, 400) == "True"
        if not prefilled:
            assert matched == (0, False)
            continue
        assert matched == (None, True)
        while matched == (None, True):
            advance(0.006)
            matched = await _matched(connector, request)
        assert matched == (384, True)


async def _matched(connector: Any, request: Any) -> tuple[int | None, bool]:
    """What the scheduler is told once the server has answered."""
    matched: tuple[int | None, bool] = (None, True)

    def answered() -> bool:
        nonlocal matched
        matched = connector.get_num_new_matched_tokens(request, 0)
        wait = connector._late._waits.get(request.request_id)
        return matched[0] is not None or (wait is not None and wait.again_s is not None)

    await eventually("the look-up is answered", answered)
    return matched


def _request(name: str, tokens: int, prefilled: bool) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    asked = {"kv_transfer_params": wire.transfer_params(prefilled=prefilled)}
    parameters = SamplingParams(max_tokens=1, extra_args=asked)
    # As the worker has it: prompts differ by the lengths of their names.
    return Request(name, [len(name)] * tokens, parameters, None)
