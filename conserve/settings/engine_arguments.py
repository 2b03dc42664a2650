"""Which of vLLM's engine arguments are not for settings to give."""

from typing import Any

# What ConServe itself decides; a value given by hand would contradict it.
_RESERVED = {
    "model": "use `model`",
    "served_model_name": "use `served_model_name`",
    "kv_transfer_config": "ConServe sets the handoff's connector",
    "enable_prefix_caching": "conversations live in the prefix cache, so it is always on",
}
# Each has vLLM allocate KV by its own allocator (cumem); sleep mode does so unasked.
_NOT_SHARED = ("enable_sleep_mode", "enable_cumem_allocator")
# What an engine with a prefill lane is not to be told; numbers are fine where they are 1.
NOT_BESIDE_A_LANE = {
    "worker_cls": "it sets it",
    "tensor_parallel_size": "the lane has one worker",
    "pipeline_parallel_size": "the lane has one worker",
    "data_parallel_size": "the lane has one worker",
    "enable_lora": "adapters are switched step by step",
    "speculative_config": "a drafter would have no KV of what the lane computes",
}


def without_reserved(arguments: dict[str, Any], field: str) -> dict[str, Any]:
    """The arguments, if all of them may be given.

    Args:
        field: the setting that they are.

    Raises:
        ValueError: one may not; says which, and why.
    """
    for name, why in _RESERVED.items():
        if name in arguments:
            raise ValueError(f"{field}.{name} cannot be set: {why}")
    for name in _NOT_SHARED:
        if arguments.get(name):
            raise ValueError(
                f"{field}.{name} cannot be set: memory of vLLM's own allocator cannot be shared "
                "with other processes, and LMCache copies KV from and to the engine's (CUDA IPC)"
            )
    return arguments
