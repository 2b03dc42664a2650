"""An engine's replica: what it says when it does not start."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.integration.vllm.vllm_multi_process_adapter import ParallelStrategy
from lmcache.v1.memory_management import AddressManager
from transformers import CONFIG_MAPPING
from vllm.distributed.device_communicators import shm_broadcast
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.worker.utils import AttentionGroup

from conserve.settings import load
from deployments.engine.engine import EngineServer, LLMServer
from deployments.engine.kv_layers import capacity_tokens, host_token_bytes
from deployments.upstream import patches
from deployments.upstream.patch import PatchError


class Server(EngineServer):
    def __del__(self) -> None:
        """Serve would await an engine's; nothing was started here."""


@pytest.mark.parametrize("server_fails", [True, False])
@pytest.mark.parametrize("engine_fails", [True, False])
async def test_an_engine_that_fails_for_lack_of_a_server_says_so(
    monkeypatch: pytest.MonkeyPatch, server_fails: bool, engine_fails: bool
) -> None:
    # Here, since it takes ten seconds, and files are read for every test.
    class Node:
        async def wait_until_healthy(self) -> None:
            if server_fails:
                raise RuntimeError("port 7610 is in use")

    async def load(self: object, config: object, engine_cls: type) -> None:
        if engine_fails:
            raise ValueError("engine core initialization failed")

    monkeypatch.setattr(LLMServer, "__init__", load)
    server = object.__new__(Server)
    server._node = Node()
    if server_fails:
        with pytest.raises(RuntimeError, match="port 7610 is in use"):
            await server._load_engine(None)
    elif engine_fails:
        with pytest.raises(ValueError, match="engine core"):
            await server._load_engine(None)
    else:
        await server._load_engine(None)


@pytest.mark.parametrize("engine_scheduler", ["vllm", "conversation", "conversation_lane"])
async def test_an_altered_vllm_is_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, engine_scheduler: str
) -> None:
    owner, name, patch = {
        "vllm": (shm_broadcast, "sched_yield", "spinning_wait"),
        "conversation": (BlockPool, "touch", "scheduler"),
        "conversation_lane": (AttentionGroup, "create_metadata_builders", "prefill_lane"),
    }[engine_scheduler]
    monkeypatch.setattr(patches, "_applied", set())
    monkeypatch.delattr(owner, name)

    settings = load({"engine_scheduler": engine_scheduler})
    tier = SimpleNamespace(sm_slots=None)
    with pytest.raises(PatchError) as refused:
        await Server.__init__(
            object.__new__(Server), {}, role="decoder", settings=settings, tier=tier, deployment="",
            whole=settings,
        )  # fmt: skip
    said = str(refused.value)
    assert said.startswith(f"patch {patch} is for vllm ==0.32.0, and vllm ")
    assert f"{name} (" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("blocks", "counted", "expected"),
    [
        # Half of the layers have a sliding window: every token takes two blocks' worth.
        (1000, 64_000, 64_000),
        (1000, None, 128_000),
    ],
)
def test_an_engine_holds_what_vllm_has_counted(
    blocks: int, counted: int | None, expected: int
) -> None:
    cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=128, kv_cache_size_tokens=counted)
    assert capacity_tokens(cache) == expected


QWEN3_8B = {"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "workers", "kept_as", "expected"),
    [
        # 147,456 bytes are published.
        (QWEN3_8B, (1, 1), "auto", 36 * 2 * 8 * 128 * 2),
        (QWEN3_8B, (1, 1), "fp8", 36 * 2 * 8 * 128),
        (QWEN3_8B, (4, 2), "auto", 36 * 2 * 8 * 128 * 2),
        (QWEN3_8B, (16, 1), "auto", 36 * 2 * 16 * 128 * 2),
        # One of the workers of each stage stores DeepSeek's vectors.
        ({"model_type": "deepseek_v3"}, (1, 1), "auto", 61 * 576 * 2),
        ({"model_type": "deepseek_v3"}, (8, 1), "auto", 61 * 576 * 2),
        ({"model_type": "deepseek_v3"}, (4, 2), "auto", 61 * 576 * 2),
        # Beside states all do.
        ({"model_type": "kimi_linear"}, (8, 1), "auto", 8 * 6 * 576 * 2),
        # Attention in 4 of 32 layers, in 20 of 35, in 12 of 48; and states, a snapshot each turn.
        ({"model_type": "jamba"}, (1, 1), "auto", 4 * 2 * 8 * 128 * 2 + 28 * 311_296 / 3272),
        ({"model_type": "gemma3n_text"}, (1, 1), "auto", 20 * 2 * 2 * 256 * 2),
        ({"model_type": "qwen3_next"}, (1, 1), "auto", 12 * 4 * 256 * 2 + 36 * 1_097_728 / 3272),
    ],
)
def test_what_a_token_takes_in_host_memory(
    config: dict[str, Any], workers: tuple[int, int], kept_as: str, expected: int
) -> None:
    assert _host_token_bytes(config, workers, 256, 1, kept_as) == expected


def test_chunks_take_whole_pages_of_host_memory() -> None:
    """A worker's chunk of 9.4 MB takes three pages of 4 MiB."""
    page = 4 * 2**20
    assert _host_token_bytes(QWEN3_8B, (4, 1), 256, page) == 4 * 3 * page / 256
    # By what LMCache's own memory hands out.
    handed_out = AddressManager(2**30, align_bytes=page).compute_aligned_size(256 * 147_456 // 4)
    assert handed_out == 3 * page


@pytest.mark.parametrize("workers", [(1, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_as_many_workers_store_as_lmcache_says(name: str, workers: tuple[int, int]) -> None:
    tensor, stages = workers
    lmcaches = ParallelStrategy(
        mla_only=name == "deepseek_v3", vllm_world_size=tensor * stages, vllm_worker_id=0,
        tp_size=tensor, pp_size=stages, n_servers=1,
    )  # fmt: skip
    # Of pages that hold any chunk, each of them takes one.
    page = 2**40
    assert _host_token_bytes({"model_type": name}, workers, 256, page) == (
        lmcaches.kv_world_size * page / 256
    )


def _host_token_bytes(
    config: dict[str, Any], workers: tuple[int, int], chunk: int, page: int, kept_as: str = "auto"
) -> float:
    """By a `VllmConfig` as far as it is read, with vLLM's own reading of heads."""
    own = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    read = ModelArchConfigConvertorBase(own, own)
    tensor, stages = workers
    stand_in = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=own,
            use_mla=read.is_deepseek_mla(),
            is_hybrid=config["model_type"] in ("jamba", "kimi_linear", "qwen3_next"),
            dtype=torch.bfloat16,
            get_total_num_kv_heads=read.get_total_num_kv_heads,
            get_head_size=read.get_head_size,
            get_total_num_hidden_layers=read.get_num_hidden_layers,
        ),
        cache_config=SimpleNamespace(cache_dtype=kept_as, mamba_ssm_cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=stages),
    )
    return host_token_bytes(stand_in, chunk, page)
