"""Has vLLM's search for Triton kernels pass over objects that answer any name.

As an engine starts on a CPU, vLLM 0.32 looks through all modules for kernels to replace, and reads
``vars(value).get("kernel")`` of all that has a ``__dict__``. llvmlite's handle of its library gives
a function for any name, this one included, and the engine ends with an AttributeError. llvmlite is
loaded with numba, which other parts of an engine's process import first.
"""

from typing import Any

from deployments.upstream.patch import Patch


def apply() -> None:
    from vllm.triton_utils import dispatcher

    dispatcher.vars = _members


def _members(value: object) -> Any:
    members = vars(value)
    return members if hasattr(members, "get") else {}


PATCH = Patch(
    name="kernel_scan",
    seams=("vllm.triton_utils.dispatcher:_rebind_kernels",),
    why="an engine on a CPU ends at its start where llvmlite is loaded before vLLM's kernels",
    upstream="not reported: _rebind_kernels fails on llvmlite.binding.ffi.lib, imported before",
    process="engine",
    device="cpu",
)
