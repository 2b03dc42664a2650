"""The arguments of every engine, in this application and in what it is compared with."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from conserve.embedded import model_path
from conserve.settings import EMBEDDED_MODELS
from conserve.settings.engine_arguments import ALLOCATOR_VARIABLES, expands_segments

# Engine arguments that may name a repository of the hub beside the model.
_ELSEWHERE = {"hf_config_path", "speculative_config", "tokenizer"}
_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)


def model_source(model: str) -> str:
    """Return where engines load a model from: a folder, or a Hugging Face id."""
    name = EMBEDDED_MODELS.get(model)
    return model if name is None else str(model_path(name=name))


def engine_arguments(model: str, gpu: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments; what an operator sets overrides them."""
    arguments: dict[str, Any] = {"max_num_batched_tokens": 8192}
    if not gpu:
        arguments = {
            "enforce_eager": True,
            "dtype": "bfloat16",
            "distributed_executor_backend": "mp",
        }
    # Answers then say how much of the prompt was found in caches.
    arguments["enable_prompt_tokens_details"] = True
    if model in EMBEDDED_MODELS:
        arguments |= {
            "max_model_len": 16384,
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            # A model that is unsure could write white space for ever, which JSON allows.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        }
    return arguments


def engine_environment(model: str, gpu: bool, arguments: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of an engine's processes; what an operator sets overrides it.

    ``arguments`` are the names of its engine arguments.
    """
    environment = {
        # Processes find KV in LMCache only if their prefix hashes are the same.
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
            # Even with `enforce_eager`, vLLM compiles a few functions of its sampler. That takes a
            # C++ compiler, and most of a start.
            "TORCH_COMPILE_DISABLE": "1",
        }
    if Path(model_source(model)).is_dir() and not _ELSEWHERE & set(arguments):
        # A model in a folder is not looked for on Hugging Face's hub.
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def allocator_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of PyTorch's allocator that have to change, with their new values.

    With ``expandable_segments`` memory cannot be shared by CUDA IPC.
    """
    return {
        name: _EXPANDABLE.sub(r"\1False", environment[name])
        for name in ALLOCATOR_VARIABLES
        if expands_segments(environment.get(name, ""))
    }


def flags(arguments: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            found += [f"--{option}", text]
    return found
