"""A real vLLM engine in this process, with a lane in front of a connector that does nothing.

It is stepped by hand; the lane's thread runs as it would in any engine.
"""

import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from conserve.embedded import model_path
from conserve.wire import StageTimes, engine_told, scheduled_turn
from conserve_inside.lane.connector import LaneConnecting
from tests import machines

BLOCK_TOKENS = 32
BLOCKS = 84


class Nothing(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Stores and loads nothing."""

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **options: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert not num_external_tokens, "it was told of a load that is not its own"

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _Metadata()


class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    pass


class LaneAlone(LaneConnecting, Nothing):
    """The lane, and nothing behind it."""


@contextmanager
def running(model: Path | None = None) -> Iterator["Engine"]:
    """Run the process's one engine: vLLM has one group of KV connectors in it."""
    machines.require_kernels()
    # Nor does an engine's own process compile: see `conserve.engines`.
    with torch.compiler.set_stance("force_eager"):
        engine = Engine(model)
        yield engine
        engine.drain()
        engine.core.shutdown()
    assert all(thread.name != "prefill-lane" for thread in threading.enumerate())


class Engine:
    """One engine. Its lane can be taken from it, and given back.

    Args:
        model: a folder with a model that reads images; None: the embedded one.
        shares: `SchedulerLane`'s ``stages``.
        image: what stands for an image in the model's prompts.
    """

    def __init__(
        self,
        model: Path | None = None,
        shares: dict[str, Any] | None = None,
        image: str = "<image>",
    ) -> None:
        self._image = image
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        torch.set_num_threads(1)
        # Chunks are short, so that there are many; feedback on time would differ between runs.
        policies: dict[str, Any] = {
            "chunks": {"least_tokens": 96, "most_tokens": 96, "late_s": 100.0},
            # However slow the machine is, nothing waits for the lane in vain.
            "lane": {"longest_wait_s": 1e6},
        }
        if shares is not None:
            policies["stages"] = shares
        seeing: dict[str, Any] = {"skip_tokenizer_init": True}
        if model is not None:
            seeing = {"limit_mm_per_prompt": {"image": 8}}
        arguments = EngineArgs(
            model=str(model or model_path()),
            **seeing,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=6,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=BLOCKS,
            block_size=BLOCK_TOKENS,
            seed=0,
            scheduler_cls="conserve_inside.scheduler.scheduling.conversation_scheduler",
            scheduling_policy="priority",
            worker_cls="conserve_inside.lane.cpu_worker.LaneWorker",
            additional_config={"conserve": policies},
            kv_transfer_config=KVTransferConfig(
                kv_connector="LaneAlone",
                kv_connector_module_path=__name__,
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
            ),
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.lane = self.scheduler.lane
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ended: set[str] = set()
        self.times: dict[str, StageTimes] = {}
        # How many of the lane's prefills a test has failed. Others would go on inline, unseen.
        self.fails = 0
        # With its first step the worker tells the lane what it can do.
        self.add("first", "go" if model else words(0, 8), 1)
        self.drain()

    @property
    def policy(self) -> Any:
        """The lane's policy, with its counts."""
        return self.lane.policy

    @property
    def thread(self) -> Any:
        """The lane's thread, of the worker's half."""
        return get_kv_transfer_group()._lane_thread

    def use_lane(self, on: bool) -> None:
        """Have the lane used, or all be computed inline."""
        self.scheduler.connector.lane = self.lane if on else None

    def add(
        self,
        name: str,
        prompt: Sequence[int] | str,
        tokens: int,
        key: str | None = None,
        images: Sequence[Any] = (),
    ) -> None:
        """A turn comes, with an image for each ``<image>`` of its text."""
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": scheduled_turn(key or name, None, False)},
        )  # fmt: skip
        given: Any = {"prompt_token_ids": prompt}
        if isinstance(prompt, str):
            text = prompt.replace("<image>", self._image)
            given = {"prompt": text, "multi_modal_data": {"image": list(images)}}
        self.engine.add_request(name, given, params)

    def abort(self, name: str) -> None:
        """Its client leaves."""
        self.engine.abort_request([name])

    def step(self) -> list[str]:
        """One step; the turns that have ended with it."""
        ended = []
        for output in self.engine.step():
            name = output.request_id
            self.answers[name] = list(output.outputs[0].token_ids)
            if output.num_cached_tokens is not None:
                self.cached[name] = output.num_cached_tokens
            if output.finished:
                ended.append(name)
                self.times[name] = engine_told(output.kv_transfer_params).stages
        self.ended.update(ended)
        return ended

    def drain(self, most_steps: int = 5_000) -> None:
        """Go on until nothing is left, of the lane's neither.

        Raises:
            AssertionError: something never ends, or a chunk has failed that no test has failed.
        """
        for _ in range(most_steps):
            if not self.scheduler.has_requests():
                assert self.policy.failed == self.fails, "a chunk of the lane has failed"
                return
            self.step()
        raise AssertionError(f"{sorted(self.scheduler.requests)} never end")

    def begin(self, lane: bool) -> None:
        """Begin anew, with nothing cached."""
        self.drain()
        self.require_no_leak()
        self.use_lane(lane)
        self.answers, self.cached, self.ended, self.times = {}, {}, set(), {}

    def require_no_leak(self) -> None:
        """Make sure that every block is free once nothing is kept.

        Raises:
            AssertionError: one is not, or somebody is still known.
        """
        assert not self.scheduler.requests, "requests are left"
        assert not self.scheduler.turns, "turns are left"
        require_empty(self.lane)
        assert self.scheduler.reset_prefix_cache(), "blocks leaked"
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1, "blocks leaked"


def require_empty(lane: Any) -> None:
    """Make sure that a lane has, and remembers, nobody.

    Raises:
        AssertionError: it does.
    """
    policy = lane.policy
    assert (policy.current, policy.current_tokens, policy.waiting) == (None, 0, 0)
    assert (lane._starts, lane._failed, lane._prefill_s) == ({}, set(), {})
    assert (lane.stages.waiting, lane.stages.encoding, lane.stages.pending) == ((), None, 0)
    assert lane.images is None or not (lane.images._waits or lane.images._ready)


def words(seed: int, tokens: int) -> list[int]:
    """Tokens of a prompt, the same for the same seed."""
    chance = random.Random(seed)
    return [chance.randrange(20, 900) for _ in range(tokens)]
