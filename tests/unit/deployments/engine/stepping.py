"""vLLM's real scheduler with a stand-in for the model, and a clock that is set.

The model "samples" each token's position, so that a token that is lost, doubled or out of order
shows. Steps may be in flight two at a time, as on a GPU.
"""

import copy
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from conserve.embedded import model_path

BLOCK_TOKENS = 32


@cache
def _config(max_num_seqs: int, step_tokens: int) -> Any:
    arguments = EngineArgs(
        model=str(model_path()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        block_size=BLOCK_TOKENS,
        skip_tokenizer_init=True,
    )
    return arguments.create_engine_config()


@dataclass
class SteppedEngine:
    """One engine without a model.

    Args:
        blocks: of KV, one of which is vLLM's own.
        two_in_flight: whether a step is scheduled while another one runs.
        step_s, token_s: what a step takes, and each of its tokens.
        spoil: called with what is sampled, before the scheduler is told.
    """

    blocks: int = 70
    two_in_flight: bool = False
    max_num_seqs: int = 6
    step_tokens: int = 256
    step_s: float = 0.004
    token_s: float = 0.00005
    spoil: Any = lambda sampled: None

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self.now_s = 0.0
        config = copy.deepcopy(_config(self.max_num_seqs, self.step_tokens))
        config.cache_config.num_gpu_blocks = self.blocks
        # Its platform has a CPU's schedule one step at a time; the stand-in can do either.
        config.scheduler_config.async_scheduling = self.two_in_flight
        self._configure(config)
        self.config = config
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=self._groups()
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.scheduler.clock = lambda: self.now_s
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._depth = 2 if self.two_in_flight else 1
        self._flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.live: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.steps = 0
        # Of each request: when it was added, and the times of its tokens.
        self.added_s: dict[str, float] = {}
        self.token_times_s: dict[str, list[float]] = {}
        self.said: dict[str, Any] = {}
        self.cached: dict[str, int] = {}
        self.preempted: list[str] = []

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int = 4,
        *,
        told: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> Any:
        """Add a request, with what its engine is told as ``kv_transfer_params``."""
        extra = {} if told is None else {"kv_transfer_params": told}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
        )
        request = Request(
            name, list(tokens), params, None, block_hasher=self._hasher, arrival_time=self.now_s,
            priority=priority,
        )  # fmt: skip
        self.live[name], self.added_s[name] = request, self.now_s
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """Its client leaves."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.live[name]

    def step(self) -> list[Any]:
        """One step; the requests that have ended with it."""
        self.steps += 1
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            self.preempted += sorted(output.preempted_req_ids or ())
            cached = output.scheduled_cached_reqs
            starts = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
            starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for one in output.scheduled_new_reqs:
                self.cached.setdefault(one.req_id, one.num_computed_tokens)
            sampled = {
                name: [] if scheduler.requests[name].is_prefill_chunk else [starts[name] + tokens]
                for name, tokens in output.num_scheduled_tokens.items()
            }
            self._flight.append((output, sampled))
        if not self._flight or (len(self._flight) < self._depth and scheduler.has_requests()):
            self.now_s += 1e-4
            return []
        output, sampled = self._flight.popleft()
        self.spoil(sampled)
        self.now_s += self.step_s + self.token_s * output.total_num_scheduled_tokens
        names = list(output.num_scheduled_tokens)
        done = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=self._connector_output(output),
            ),
        )
        ended = []
        for outputs in done.values():
            for one in outputs.outputs:
                times = self.token_times_s.setdefault(one.request_id, [])
                times += [self.now_s] * len(one.new_token_ids)
                if one.finish_reason is not None and one.request_id in self.live:
                    request = self.live.pop(one.request_id)
                    self.said[one.request_id] = one.kv_transfer_params
                    first = request.num_prompt_tokens
                    right = list(range(first, first + request.max_tokens))
                    if list(request.output_token_ids) != right:
                        self.wrong.append(one.request_id)
                    ended.append(request)
        return ended

    def _configure(self, config: Any) -> None:
        """For whoever has another engine."""

    def _groups(self) -> list[Any]:
        """The model's layers: one, with full attention."""
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        return [KVCacheGroupSpec(["layer"], spec)]

    def _connector_output(self, output: Any) -> Any:
        """What a step's KV connector says, in the worker."""
        return None

    def drain(self, most_steps: int = 20_000) -> None:
        """Go on until nothing is left.

        Raises:
            AssertionError: something never ends.
        """
        for _ in range(most_steps):
            if not self.live and not self._flight:
                return
            self.step()
        raise AssertionError(f"{sorted(self.live)} never end")

    def require_no_leak(self) -> None:
        """Make sure that every block is free once nothing is kept.

        Raises:
            AssertionError: one is not, or somebody is still known.
        """
        assert not self.scheduler.requests, "requests are left"
        assert not getattr(self.scheduler, "turns", None), "turns are left"
        assert self.scheduler.reset_prefix_cache(), "blocks leaked"
        assert self.pool.get_num_free_blocks() == self.blocks - 1, "blocks leaked"
        used = [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null]
        assert not used, f"blocks {used} are held by nobody"


def words(chance: random.Random, tokens: int) -> list[int]:
    """Tokens of a prompt."""
    return [chance.randrange(500) for _ in range(tokens)]
