"""What vLLM itself says of engine arguments, before any engine starts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from conserve.settings import load
from deployments.engine_arguments import of_model, refusals, require_one_split
from tests.unit.hetero.shapes import NO_LATENT

# Small, with latent attention in every layer.
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": None,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_what_vllm_knows_none_of_is_refused_and_what_is_near_is_named() -> None:
    given = {"max_modle_len": 1, "kv_cache_dtypes": "fp8", "zzz": 0, "tool_call_parser": "hermess"}
    assert refusals(given) == {
        "max_modle_len": "vLLM has no such engine argument; did you mean max_model_len?",
        "kv_cache_dtypes": "vLLM has no such engine argument; did you mean kv_cache_dtype?",
        "zzz": "vLLM has no such engine argument; leave it out",
        "tool_call_parser": "vLLM has none of this name; did you mean hermes?",
    }


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dtype", "bfloat17", "give auto, half, float16, bfloat16"),
        ("max_model_len", "8k", "give a whole number"),
        ("enforce_eager", "ja", "give true or false"),
        ("max_num_seqs", 0, "give a whole number from 1 on"),
        ("compilation_config", {"moed": 3}, "Unexpected keyword argument"),
        ("reasoning_parser", "qwen4", "did you mean qwen3?"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: Any, said: str) -> None:
    assert said in refusals({name: value})[name]


@pytest.mark.parametrize(
    "given",
    [
        {"max_model_len": -1, "gpu_memory_utilization": 0.9, "max_num_batched_tokens": None},
        {"attention_backend": "FLASH_ATTN", "cudagraph_capture_sizes": [1, 2]},
        {"compilation_config": {"mode": 3}, "speculative_config": {"method": "ngram"}},
        {"limit_mm_per_prompt": {"image": 1}, "hf_overrides": {"rope_theta": 1}},
        {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "chat_template": "x"},
        {"tool_call_parser": "mine", "tool_parser_plugin": "/mine.py"},
        {"distributed_executor_backend": "mp", "enable_expert_parallel": True},
    ],
)
def test_what_vllm_takes_is_not_refused(given: dict[str, Any]) -> None:
    assert refusals(given) == {}


def test_no_default_of_vllms_is_refused() -> None:
    """Whatever type it is declared to have."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(AsyncEngineArgs)
        if field.default is not dataclasses.MISSING and not field.name.startswith("_")
    }
    assert len(defaults) > 100
    assert refusals(defaults).keys() <= {"prefix_cache_retention_interval"}


def test_what_does_not_go_with_the_model_is_refused(tmp_path: Path) -> None:
    """By vLLM's own configuration, as an engine has it."""
    problem = of_model(folder(tmp_path, LATENT), {"max_model_len": 99_999}).problem
    assert "max_model_len (99999) is greater than" in problem
    unknown = folder(tmp_path, LATENT | {"architectures": ["NoSuchModel"]})
    assert "NoSuchModel" in of_model(unknown, {}).problem


def test_only_kv_that_is_the_same_on_each_worker_may_be_split_otherwise(tmp_path: Path) -> None:
    """`--plan` refuses the others, in tests/unit/conserve_cli/test_gpu_plan.py."""
    model = folder(tmp_path, LATENT)
    given = {"model": model, "device": "cpu", "decoders.engine.tensor_parallel_size": 2}
    require_one_split(load(given))
    assert of_model(folder(tmp_path, NO_LATENT), {}).one_for_all is False
