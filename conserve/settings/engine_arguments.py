"""Which of vLLM's engine arguments settings may not give, and which must not differ among roles."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

# What ConServe itself decides; a value given by hand would contradict it.
_RESERVED = {
    "model": "use `model`",
    "served_model_name": "use `served_model_name`",
    "lora_modules": "use `adapters`, of which KV is told apart",
    "default_mm_loras": "use `adapters`, of which KV is told apart",
    "kv_transfer_config": "ConServe sets the handoff's connector",
    "ec_transfer_config": "ConServe sets the connector of encoded images",
    "enable_prefix_caching": "conversations live in the prefix cache, so it is always on",
}
# Each has vLLM allocate KV by its own allocator (cumem); sleep mode does so unasked.
_NOT_SHARED = ("enable_sleep_mode", "enable_cumem_allocator")
# Those that ConServe works with itself, before vLLM sees them; each is a number from 1 on.
_COUNTS = (
    "tensor_parallel_size", "pipeline_parallel_size", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_memory_bytes",
)  # fmt: skip
_SHARES = ("gpu_memory_utilization",)
# Of PyTorch's allocator: the newer name, and the one that it had.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# What an engine with a prefill lane is not to be told; numbers are fine where they are 1.
NOT_BESIDE_A_LANE = {
    "worker_cls": "it sets it",
    "tensor_parallel_size": "the lane has one worker",
    "pipeline_parallel_size": "the lane has one worker",
    "data_parallel_size": "the lane has one worker",
    "enable_lora": "adapters are switched step by step",
    "speculative_config": "a drafter would have no KV of what the lane computes",
}

# A decoder finds what a prefiller has stored by LMCache's keys, and takes its bytes as they are. Of
# an engine, LMCache 0.5.6 has in its keys the model's name and among how many workers KV is split,
# and nothing else (`ObjectKey`).
_OTHER_KEYS = (
    "LMCache's keys say among how many workers KV is split, so a decoder would find nothing of "
    "what a prefiller has stored"
)
_OTHER_BYTES = "KV is taken as it was stored, and LMCache's keys do not say in which form that is"
_OTHER_MODEL = "a conversation would begin with one model and go on with another"
_DECIDE_THE_MODEL = (
    "revision", "code_revision", "model_weights", "load_format", "config_format", "hf_config_path",
    "hf_overrides", "model_class_overrides", "quantization", "quantization_config", "tokenizer",
    "tokenizer_mode", "tokenizer_revision",
)  # fmt: skip
_AGREED = {
    **dict.fromkeys((
        "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
    ), _OTHER_KEYS),
    **dict.fromkeys((
        "dtype", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "block_size",
        "cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size", "disable_sliding_window",
        "disable_hybrid_kv_cache_manager", "mamba_block_size", "mamba_cache_dtype",
        "mamba_ssm_cache_dtype", "mamba_cache_mode", "use_replayssm", "replayssm_buffer_len",
        "model_impl",
    ), _OTHER_BYTES),
    **dict.fromkeys(_DECIDE_THE_MODEL, _OTHER_MODEL),
    "speculative_config": "a drafter has KV of its own, which only engines with that drafter store",
    "mm_hasher_algorithm": "LMCache's keys have images by their hash",
}  # fmt: skip
# Engine arguments that are known here by name, for hints.
KNOWN_ARGUMENTS = frozenset((*_COUNTS, *_SHARES, *_AGREED, *NOT_BESIDE_A_LANE, "max_model_len"))
# Arguments by which an image becomes something else, or is known by another name.
_DECIDE_ENCODING = (
    "dtype", "mm_hasher_algorithm", "mm_processor_kwargs", "media_io_kwargs", *_DECIDE_THE_MODEL,
)  # fmt: skip
_AGREED_VARIABLES = {
    "VLLM_MLA_DISABLE": _OTHER_BYTES,
    "VLLM_PP_LAYER_PARTITION": _OTHER_BYTES,
    "VLLM_MM_HASHER_ALGORITHM": _AGREED["mm_hasher_algorithm"],
}
_ONE_NAME = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}
# Methods of speculative decoding without KV of a drafter.
_NO_DRAFTER = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
# A value that is shown in a refusal: a name or a number, nothing that could be a secret.
_LONGEST_SHOWN = 40


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
    for name in (*_COUNTS, *_SHARES):
        problem = _number_problem(name, arguments.get(name))
        if problem:
            raise ValueError(f"{field}.{name}: {problem}")
    return arguments


def expands_segments(allocator: str) -> bool:
    """Whether these settings of PyTorch's allocator have it use memory that no IPC shares."""
    options = (option.partition(":") for option in allocator.split(","))
    return any(
        name.strip() == "expandable_segments" and value.strip().lower() == "true"
        for name, _, value in options
    )


def without_expandable_segments(environment: Mapping[str, str], field: str) -> None:
    """Refuse variables by which an engine's KV could not be mapped by LMCache's server.

    Raises:
        ValueError: says which.
    """
    for name in ALLOCATOR_VARIABLES:
        if expands_segments(environment.get(name, "")):
            raise ValueError(
                f"{field}.{name} cannot have expandable_segments:True: memory of that kind cannot "
                "be shared with other processes, and LMCache copies KV from and to the engine's "
                "(CUDA IPC)"
            )


def _number_problem(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if name in _SHARES:
        return None if 0 < number <= 1 else "give a number above 0, and at most 1"
    whole = number >= 1 and number.is_integer() and not isinstance(value, bool)
    return None if whole else "give a whole number from 1 on"


def disagreements(
    engine: Mapping[str, Any],
    prefillers: Mapping[str, Any],
    decoders: Mapping[str, Any],
    variables: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
) -> list[str]:
    """Return a line for each setting by which roles could not read each other's KV.

    ``tensor_parallel_size`` is not among them: whether it matters depends on the model
    (`workers_disagree`).

    Args:
        engine: the arguments of both roles.
        prefillers: those of prefillers alone; ``decoders`` likewise.
        variables: the environment variables of prefillers, and of decoders.
    """
    found = [*_differing(_AGREED, engine, prefillers, decoders)]
    for name, why in _AGREED_VARIABLES.items():
        values = [one.get(name) for one in variables]
        if values[0] != values[1]:
            own = "decoders" if values[1] is not None else "prefillers"
            found.append(_line(own, f"env.{name}", values[0], values[1], why))
    return found


def workers_disagree(
    engine: Mapping[str, Any], prefillers: Mapping[str, Any], decoders: Mapping[str, Any]
) -> str | None:
    """Return a line if roles split each layer among different numbers of workers; else None.

    It does not matter to a model all of whose layers have latent attention (MLA): its KV is the
    same on each worker, and LMCache keeps it once.
    """
    agreed = {"tensor_parallel_size": _OTHER_KEYS}
    return next(_differing(agreed, engine, prefillers, decoders), None)


def _differing(
    agreed: Mapping[str, str],
    engine: Mapping[str, Any],
    prefillers: Mapping[str, Any],
    decoders: Mapping[str, Any],
) -> Iterator[str]:
    both = (_plain({**engine, **prefillers}), _plain({**engine, **decoders}))
    for name, why in agreed.items():
        if _compared(name, both[0]) != _compared(name, both[1]):
            own = "decoders" if name in _plain(decoders) else "prefillers"
            yield _line(own, f"engine.{name}", both[0].get(name), both[1].get(name), why)


def encoders_disagree(
    engine: Mapping[str, Any], encoders: Mapping[str, Any], decoders: Mapping[str, Any]
) -> list[str]:
    """Return a line for each argument by which encoders would encode for nothing."""
    both = ({**engine, **encoders}, {**engine, **decoders})
    return [
        f"encoders.engine.{name}: {_shown(both[0].get(name))}, but decoders have "
        f"{_shown(both[1].get(name))}, which would make something else of an image; set "
        f"engine.{name} for all roles"
        for name in _DECIDE_ENCODING
        if _compared(name, both[0]) != _compared(name, both[1])
    ]


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, with the long form of a drafter's where vLLM's short one is given."""
    plain = dict(arguments)
    short = {
        name: plain.get(f"spec_{name}") for name in ("method", "model") if plain.get(f"spec_{name}")
    }
    if short and not plain.get("speculative_config"):
        plain["speculative_config"] = short
    return plain


def _compared(name: str, arguments: Mapping[str, Any]) -> Any:
    value = arguments.get(name)
    if name == "speculative_config":
        of_none = isinstance(value, Mapping) and value.get("method") in _NO_DRAFTER
        return None if of_none else value or None
    if name.endswith(("_parallel_size", "_interleave_size")):
        return str(value or 1)
    # What is computed by default on a CPU is not `auto`.
    if name != "dtype" and value == "auto":
        return None
    if value in (None, False, "", {}, []):
        return None
    return value if isinstance(value, Mapping | list) else _ONE_NAME.get(str(value), str(value))


def _line(own: str, field: str, prefillers: Any, decoders: Any, why: str) -> str:
    other, mine, theirs = "prefillers", decoders, prefillers
    if own == "prefillers":
        other, mine, theirs = "decoders", prefillers, decoders
    both = f"set {field} for both roles" if field.startswith("engine.") else "set it for both roles"
    return f"{own}.{field}: {_shown(mine)}, but {other} have {_shown(theirs)}: {why}; {both}"


def _shown(value: Any) -> str:
    if value is None:
        return "the default"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str) and len(value) <= _LONGEST_SHOWN:
        return value
    return "another value"
