"""What every engine is started with, in this application and in what it is compared with."""

from pathlib import Path
from typing import Any

from conserve.embedded import model_path
from conserve.settings import EMBEDDED_MODEL


def model_source(model: str) -> str:
    """Where engines load a model from: a folder, or a Hugging Face id."""
    return str(model_path()) if model == EMBEDDED_MODEL else model


def engine_arguments(model: str, gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments; what an operator sets goes over them."""
    arguments: dict[str, Any] = {"max_num_batched_tokens": 8192}
    if not gpu:
        arguments = {
            "enforce_eager": True,
            "dtype": "bfloat16",
            "distributed_executor_backend": "mp",
        }
    if model == EMBEDDED_MODEL:
        arguments |= {
            "max_model_len": 16384,
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            # Unsure of what comes next, it would fill the white space that JSON allows for ever.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        }
    return arguments


def engine_environment(model: str, gpu: bool) -> dict[str, str]:
    """The environment of an engine's processes; what an operator sets goes over it."""
    environment = {
        # The same prefix hashes in every process, or nothing is found in LMCache.
        "PYTHONHASHSEED": "0",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not gpu:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    if Path(model_source(model)).is_dir():
        # What lies in a folder is not looked for elsewhere.
        environment["HF_HUB_OFFLINE"] = "1"
    return environment
