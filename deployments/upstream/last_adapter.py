"""Has turns without an adapter (LoRA) be computed without one beside those that have one, on CPUs.

In vLLM 0.32 a token without an adapter has the index -1. Its kernels for GPUs pass such tokens
over; those for CPUs take the weights in the last slot. All of them are linear in their input, so it
is made zero for these tokens.
"""

import functools
from typing import Any

from deployments.upstream.patch import Patch, of

_KERNELS = ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink")


def apply() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in _KERNELS:
        kernel = _passing_over(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, kernel)


def _passing_over(kernel: Any) -> Any:
    @functools.wraps(kernel)
    def passing(
        inputs: Any, weights: Any, output: Any, indices: Any, *more: Any, **named: Any
    ) -> None:
        without = indices < 0
        if without.any():
            inputs = inputs.masked_fill(without.unsqueeze(1), 0)
        kernel(inputs, weights, output, indices, *more, **named)

    return passing


PATCH = Patch(
    name="last_adapter",
    seams=(
        *of("vllm.lora.ops.torch_ops.lora_ops", " ".join(_KERNELS)),
        *of("vllm.lora.punica_wrapper.punica_cpu", " ".join(_KERNELS)),
    ),
    why="a turn without an adapter is answered with another turn's adapter, if both run at a time",
    upstream="vllm-project/vllm#48421 and #49656 (open)",
    process="engine",
    device="cpu",
)
