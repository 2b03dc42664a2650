"""A vLLM engine whose stores take their time, and without Ray; told what to do as `worker` is.

What stands in is at the end of LMCache's client in the engine's worker: there the word that a
prompt's chunks are complete is sent to the server late, and so found late.
"""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from conserve import wire
from conserve.engines import engine_environment
from conserve.settings import EMBEDDED_MODEL
from deployments.engine.lmcache_connector import ResilientMPConnector
from deployments.engine.stored import StoredPrompts
from deployments.engine.warm_up import forget
from tests.engines.lmcache.engine import arguments
from tests.engines.lmcache.worker import say

TAKES_S = 0.2
PROMPT = list(range(5, 405))
# In the environment: where the worker notes when a store begins and ends.
_NOTES = "TEST_STORES"
_OTHER_TOKENS = 200


class SlowConnector(ResilientMPConnector):
    """In a worker: a store takes `TAKES_S` longer."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        from lmcache.v1.multiprocess.futures import MessagingFuture

        super().register_kv_caches(kv_caches)
        client = self.worker_adapter.req_client
        commit = client.commit_store

        def commit_late(*given: Any) -> Any:
            late: MessagingFuture[bool] = MessagingFuture()

            def pass_on() -> None:
                stored = commit(*given).result(30)
                _note("ended")
                late.set_result(stored)

            _note("began")
            threading.Timer(TAKES_S, pass_on).start()
            return late

        client.commit_store = commit_late


def _note(what: str) -> None:
    # The clock is the machine's, and the same for all processes.
    with Path(os.environ[_NOTES]).open("a") as notes:
        print(what, time.monotonic(), file=notes, flush=True)


async def _run(client: Any, name: str, prompt: list[int], tokens: int, **params: Any) -> Any:
    """A request's tokens, the times of its outputs, and what is said of its caches."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": wire.transfer_params(**params)},
    )  # fmt: skip
    got: list[int] = []
    times_s, said = [], None
    async for output in client.generate({"prompt_token_ids": prompt}, asked, name):
        got += output.outputs[0].token_ids
        times_s.append(time.monotonic())
        said = output.kv_transfer_params or said
    return got, times_s, wire.cached_tokens(said)


async def _beside(client: Any) -> dict[str, Any]:
    """A prompt is stored while another request puts out tokens; then it is taken over."""
    right, _, _ = await _run(client, "right", PROMPT, 8)
    assert await forget(client), "a prompt's blocks are kept for ever"
    other = asyncio.create_task(_run(client, "other", [7, 8, 9], _OTHER_TOKENS))
    await asyncio.sleep(0.1)
    _, answered_s, _ = await _run(client, "stores", PROMPT, 1, park=True)
    _, times_s, _ = await other
    assert await forget(client), "a prompt's blocks are kept for ever"
    again, _, found = await _run(client, "again", PROMPT, 8, prefilled=True)
    return {
        "answered_s": answered_s[-1],
        "others_s": times_s,
        "same": again == right,
        "found": found.lmcache_tokens,
        "late": found.late,
    }


async def serve(port: str) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    chosen = arguments(port, SlowConnector.__name__, "tests.engines.lmcache.slow", "kv_both")
    client = AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen))
    client.generate = StoredPrompts(client).generate
    say("ready")
    for line in iter(sys.stdin.readline, ""):
        assert line.strip() == "beside"
        say(json.dumps(await _beside(client)))
    client.shutdown()


if __name__ == "__main__":
    os.environ.update(engine_environment(EMBEDDED_MODEL, gpu=False))
    os.environ[_NOTES] = sys.argv[2]
    asyncio.run(serve(sys.argv[1]))
