"""An engine's replica: what it says when it does not start."""

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.anyio
@pytest.mark.parametrize("server_fails", [True, False])
@pytest.mark.parametrize("engine_fails", [True, False])
async def test_an_engine_that_fails_for_lack_of_a_server_says_so(
    monkeypatch: pytest.MonkeyPatch, server_fails: bool, engine_fails: bool
) -> None:
    # Here, since it takes ten seconds, and files are read for every test.
    from deployments.engine.engine import EngineServer, LLMServer

    class Node:
        async def wait_until_healthy(self) -> None:
            if server_fails:
                raise RuntimeError("port 7610 is in use")

    async def load(self: object, config: object, engine_cls: type) -> None:
        if engine_fails:
            raise ValueError("engine core initialization failed")

    class Server(EngineServer):
        def __del__(self) -> None:
            """Serve would await an engine's; nothing was started here."""

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
    from deployments.engine.engine import capacity_tokens

    cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=128, kv_cache_size_tokens=counted)
    assert capacity_tokens(cache) == expected


@pytest.mark.parametrize(
    ("model", "parallel", "kept_as", "expected"),
    [
        ({}, 1, "auto", 36 * 2 * 8 * 128 * 2),
        ({}, 1, "fp8", 36 * 2 * 8 * 128),
        ({}, 16, "auto", 36 * 2 * 16 * 128 * 2),
        # vLLM gives all of DeepSeek's heads, which share one vector; so do workers.
        ({"use_mla": True, "kv_heads": 128, "head_size": 576}, 1, "auto", 36 * 576 * 2),
        ({"use_mla": True, "kv_heads": 128, "head_size": 576}, 8, "auto", 36 * 576 * 2),
    ],
)
def test_what_a_token_takes_in_host_memory(
    model: dict[str, Any], parallel: int, kept_as: str, expected: int
) -> None:
    """The first is Qwen3-8B, of which 147,456 bytes are published."""
    import torch

    from deployments.engine.engine import kv_token_bytes

    its = {"use_mla": False, "kv_heads": 8, "head_size": 128} | model
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=its["use_mla"],
            dtype=torch.bfloat16,
            get_total_num_kv_heads=lambda: its["kv_heads"],
            get_head_size=lambda: its["head_size"],
            get_total_num_hidden_layers=lambda: 36,
        ),
        cache_config=SimpleNamespace(cache_dtype=kept_as),
        parallel_config=SimpleNamespace(tensor_parallel_size=parallel),
    )
    assert kv_token_bytes(config) == expected
