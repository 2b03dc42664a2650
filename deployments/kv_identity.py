"""Tells KV of one configuration from another's: LMCache's keys have the model's name and tokens.

A node's LMCache server outlives deployments, and its disk outlives servers. So the name that
LMCache is given carries a digest of all else that KV depends on.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from conserve.engines import engine_arguments
from conserve.settings import Settings
from conserve.versions import installed
from conserve.wire import CHUNK_TOKENS

# In the connector's configuration: the digest of `of_settings`, and whether files are also told
# apart by their times, which copies on several nodes need not have in common.
KV_SETTINGS, FILE_TIMES = "conserve.kv_settings", "conserve.file_times"

# Arguments that decide how much fits, or how answers are read; some are chosen anew at each start.
_WITHOUT_EFFECT = {
    "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_num_seqs",
    "max_num_batched_tokens", "mm_processor_cache_gb", "disable_log_stats", "tool_call_parser",
    "reasoning_parser", "enable_auto_tool_choice", "structured_outputs_config", "enable_lora",
    "max_loras", "max_cpu_loras", "max_lora_rank",
}  # fmt: skip
_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py"}
# A large file is read at `_PLACES` places.
_PLACES, _PLACE_BYTES = 64, 2**12


def of_settings(settings: Settings, gpu: bool) -> str:
    """Return a digest of the settings that KV depends on, the same for all roles' engines."""
    given = engine_arguments(settings.model, gpu) | settings.engine
    said: list[Any] = [settings.model, gpu, installed()["vllm"], installed()["lmcache"]]
    for own in (settings.of_role("decoder"), settings.of_role("prefiller")):
        arguments = {**given, **own.engine}
        said.append({name: arguments[name] for name in arguments.keys() - _WITHOUT_EFFECT})
        said.append(own.env)
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def cache_name(name: str, vllm_config: Any) -> str:
    """Return the name of a loaded engine's model in LMCache's keys, by its name in LMCache."""
    # Encoders have no connector.
    model, transfer = vllm_config.model_config, getattr(vllm_config, "kv_transfer_config", None)
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    weights = _of_files(model.model, getattr(model, "revision", None), bool(extra.get(FILE_TIMES)))
    said = [extra.get(KV_SETTINGS), extra.get(CHUNK_TOKENS), weights]
    return f"{name}##{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]}"


@functools.cache
def _of_files(model: str, revision: str | None, times: bool) -> str:
    """Return what tells a model's weights and code from others: a hub's commit, or its files'."""
    path = Path(model).expanduser()
    if not path.exists():
        try:
            found = try_to_load_from_cache(model, "config.json", revision=revision)
        except HFValidationError:
            found = None
        # The folder of a snapshot has the commit's name. An object store's model has its own alone.
        return Path(found).parent.name if isinstance(found, str) else model
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix not in _FILES or not file.is_file():
            continue
        size, modified = file.stat().st_size, file.stat().st_mtime_ns if times else 0
        digest.update(f"{file.name}/{size}/{modified}/".encode())
        with file.open("rb", buffering=0) as read:
            for place in range(0, size, max(_PLACE_BYTES, size // _PLACES)):
                read.seek(place)
                digest.update(read.read(_PLACE_BYTES))
    return digest.hexdigest()
