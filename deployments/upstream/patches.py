"""The table of all patches, and the one place from which a process applies its own."""

import importlib
from functools import cache
from typing import Any

from deployments.upstream.patch import Patch, Process, require
from deployments.upstream.seams import seams

# Files of this folder, in the order in which they are applied.
FILES = (
    "kernel_scan", "captured_elsewhere", "last_adapter", "loose_forced_calls", "zeroed_kv",
    "spinning_wait", "named_shared_memory", "impatient_memory_check", "encoder_errors",
    "unreachable_scheduler", "connector_race", "cut_calls", "media_names", "message_fields",
    "message_prefill", "message_start", "prepared_twice", "prompt_lengths", "copies_in_steps",
    "forgotten_worker", "hasty_client", "lost_server", "named_pool", "spinning_progress",
    "unfinished_copies", "outer_address", "replica_port", "sigterm_exits", "unbounded_grammars",
    "uncallable_tools",
)  # fmt: skip

_applied: set[str] = set()


@cache
def files() -> tuple[Any, ...]:
    """Return the files of all patches, and load nothing of the projects that they change."""
    return tuple(importlib.import_module(f"{__package__}.{name}") for name in FILES)


def patches() -> tuple[Patch, ...]:
    return (*(file.PATCH for file in files()), *seams().values())


def apply_patches(process: Process) -> None:
    """Apply the patches of a process, each once.

    Raises:
        PatchError: another project is not as a patch expects it.
    """
    for file in files():
        patch: Patch = file.PATCH
        if patch.process != process or not hasattr(file, "apply") or patch.name in _applied:
            continue
        if _is_for_this(patch):
            require(patch)
            file.apply()
        _applied.add(patch.name)


def patch_engine() -> None:
    """Patch a process of an engine; vLLM's plugin ``conserve_patches`` (see pyproject.toml)."""
    apply_patches("engine")


def _is_for_this(patch: Patch) -> bool:
    if patch.device is None:
        return True
    from vllm.platforms import current_platform

    return bool(current_platform.device_type == patch.device)
