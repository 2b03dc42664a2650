"""An engine's worker without the engine: LMCache's own adapter, made as the connector makes it.

Lines on its standard input tell it what to do; each is answered by a line.
"""

import sys
import threading
import time
from typing import Any

import torch
import zmq

from deployments.upstream import forgotten_worker
from deployments.upstream.lost_server import fail_fast
from deployments.upstream.patches import apply_patches
from tests.unit.deployments.engine.connectors import worker_half

CHUNK_TOKENS = 128
MODEL = "worker"
# Before each answer.
SAYS = "says: "
# How long the copy of a store that only begins lasts.
COPY_S = 1.0


def options(mode: str) -> dict[str, object]:
    """LMCache's configuration of a worker, and of a scheduler."""
    return {
        "lmcache.mp.heartbeat_interval": 1,
        "lmcache.mp.mq_timeout": 10,
        "lmcache.mp.mp_transfer_mode": mode,
    }


def main(port: str, mode: str, name: str = MODEL, dtype: str = "bfloat16") -> None:
    apply_patches("connector")
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
        ParallelStrategy,
    )

    adapter = LMCacheMPWorkerAdapter(
        f"tcp://127.0.0.1:{port}",
        zmq.Context.instance(),
        name,
        CHUNK_TOKENS,
        ParallelStrategy(False, 1, 0, 1, 1, 1),
        extra_config=options(mode),
    )
    late_s = 0.0
    copy = SlowCopy()
    fail_fast(adapter.req_client, adapter._health_event)
    forgotten_worker.monotonic = lambda: time.monotonic() + late_s
    # Keys and values of 16 blocks.
    blocks = torch.zeros(2, 16, 1, CHUNK_TOKENS, 64, dtype=getattr(torch, dtype))
    adapter.register_kv_caches({"layer.0": blocks}, layout_hints={"kv_layout": "HND"})
    adapter._ensure_heartbeat_started()
    say(adapter.instance_id)
    for line in sys.stdin:
        does, *given = line.split()
        said: object = "done"
        if does in ("store", "begin"):
            name, tokens = given[0], int(given[1])
            chunks = tokens // CHUNK_TOKENS
            ids = [len(name)] * tokens
            op = LoadStoreOp(ids, [list(range(1, 1 + chunks))], 0, chunks * CHUNK_TOKENS)
            if does == "begin":
                copy.replace()
            adapter.submit_store_request(name, op, adapter.create_recorded_event())
            if does == "begin":
                copy.began.wait(30)
            else:
                said = adapter.store_futures[name].result(30)
        elif does == "sleep":
            # As if it had been stopped for longer than the server waits for it.
            late_s += forgotten_worker.REAP_TIMEOUT_S
        elif does == "end":
            worker_half(adapter).unmap()
            if copy.began.is_set():
                said = "copied" if copy.ended.is_set() else "copying"
        say(said)


class SlowCopy:
    """Replaces LMCache's copy to the server's memory by one that takes `COPY_S`."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()

    def replace(self) -> None:
        from lmcache.v1.multiprocess.transfer_context import async_engine_driven

        copies = async_engine_driven.gather_paged_kv_to_cpu

        def slowly(*given: Any, **named: Any) -> Any:
            self.began.set()
            time.sleep(COPY_S)
            copied = copies(*given, **named)
            self.ended.set()
            return copied

        async_engine_driven.gather_paged_kv_to_cpu = slowly


def say(what: object) -> None:
    """Answer, by a line that no log has."""
    sys.stdout.write(f"{SAYS}{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
