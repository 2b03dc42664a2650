"""The table of all patches, and the one place from which a process applies its own."""

import importlib
from functools import cache

from deployments.upstream.patch import Patch, Process, require

# Files of this folder. They import what they patch when they are applied, so the table is quick.
FILES = ("kernel_scan",)


@cache
def patches() -> tuple[Patch, ...]:
    """Return the records of all files, in the order in which they are applied."""
    return tuple(importlib.import_module(f"{__package__}.{name}").PATCH for name in FILES)


def apply_patches(process: Process) -> None:
    """Apply all patches of a process, which may have them already.

    Raises:
        PatchError: another project is not as a patch expects it.
    """
    for patch in patches():
        if patch.process == process and patch.apply is not None and _is_for_this(patch):
            require(patch)
            patch.apply()


def patch_engine() -> None:
    """Patch a process of an engine; vLLM's plugin ``conserve_patches`` (see pyproject.toml)."""
    apply_patches("engine")


def _is_for_this(patch: Patch) -> bool:
    if patch.device is None:
        return True
    from vllm.platforms import current_platform

    return bool(current_platform.device_type == patch.device)
