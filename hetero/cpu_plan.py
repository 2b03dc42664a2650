"""Plans the host memory of engines on CPUs, and checks that they fit. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from conserve.engines import engine_arguments, engine_environment
from conserve.settings import Settings, SettingsError
from conserve.wire import Role
from hetero import host_memory
from hetero.container import HostMemory
from hetero.engine_needs import GIB, gib, require_longest, role_needs
from hetero.model_shape import ModelShape

_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Memory of an application on CPUs; ``kv_gb`` is each worker's, by role that has KV."""

    kv_gb: Mapping[str, float]
    weights_bytes: int | None  # Of all engines together.
    size_gb: float  # Of LMCache's server.
    memory: HostMemory
    images: str = ""  # Host memory for images, in words; empty: the model reads text only.
    dtype: str = ""  # What engines compute in, and why.
    terms: tuple[str, ...] = ()  # What engines take, in words; with those of models before.
    taken_bytes: int = 0


def plan(
    settings: Settings, shape: ModelShape | None, memory: HostMemory, beside: CpuPlan | None = None
) -> tuple[Settings, CpuPlan]:
    """Return the settings with LMCache's memory chosen, and the memory that engines take.

    ``memory`` is that of the machine that runs all engines, ``beside`` the plan of models before
    this one. Raises `SettingsError` if vLLM would not start the engines, or they need more memory
    than there is.
    """
    lmcache, encoded = settings.lmcache, host_memory.encoded_bytes(settings, shape)
    if "size_gb" in lmcache.model_fields_set:
        host_memory.require_room(lmcache.size_gb, encoded, memory)
    else:
        size_gb = host_memory.capped_gb(lmcache.size_gb, memory.available_bytes - encoded)
        lmcache = lmcache.model_copy(update={"size_gb": size_gb})
        settings = settings.model_copy(update={"lmcache": lmcache})
    spaces = {name: _kv_bytes(settings, name) for name, _ in settings.roles if name != "encoders"}
    made = CpuPlan({}, None, lmcache.size_gb, memory) if beside is None else beside
    if shape is not None:
        made = _require_fit(settings, shape, spaces, made)
    kv_gb = {name: space / GIB for name, space in spaces.items()}
    engines = sum(own.replicas for _, own in settings.roles)
    settings = host_memory.with_prepared(settings, shape, engines, memory.available_bytes)
    images = host_memory.images_said(settings) if shape is not None and shape.sees else ""
    return settings, replace(
        made, kv_gb=kv_gb, size_gb=lmcache.size_gb, images=images or made.images
    )


def _kv_bytes(settings: Settings, name: str) -> int:
    own = dict(settings.roles)[name]
    told = (settings.engine | own.engine).get("kv_cache_memory_bytes")
    if told is not None and _KV_SPACE not in own.env:
        return int(told)
    environment = engine_environment(settings.model, gpu=False) | own.env
    try:
        return int(environment[_KV_SPACE]) * GIB
    except ValueError:
        raise SettingsError(f"{name}.env.{_KV_SPACE}: give a whole number of GiB") from None


def _require_fit(
    settings: Settings, shape: ModelShape, spaces: Mapping[str, int], made: CpuPlan
) -> CpuPlan:
    """Return the plan with these engines, too."""
    memory = made.memory
    weights, taken, lines = made.weights_bytes or 0, made.taken_bytes, [*made.terms]
    encoded = host_memory.encoded_bytes(settings, shape)
    of = f"{settings.model_id} " if settings.models else ""
    for name, own in settings.roles:
        arguments = engine_arguments(settings.model, gpu=False) | settings.engine | own.engine
        # On a CPU vLLM reserves nothing for a step: only weights and KV count.
        counted = {"max_num_batched_tokens": 0} | arguments
        role = cast(Role, name.removesuffix("s"))
        each = replace(role_needs(role, shape, counted, None), reserve_bytes=0)
        space = spaces.get(name, 0)
        if space and not each.at_most and "num_gpu_blocks_override" not in arguments:
            told = "kv_cache_memory_bytes" in arguments and _KV_SPACE not in own.env
            setting = "engine.kv_cache_memory_bytes" if told else f"env.{_KV_SPACE}"
            require_longest(f"{name}.{setting}", space, each)
        count = own.replicas * settings.workers_of(own)
        weights += count * each.weights_bytes
        taken += count * (each.weights_bytes + space)
        lines.append(
            f"{own.replicas} {of}{name} x ({each.weights_bytes / GIB:.1f} weights + "
            f"{space / GIB:.1f} KV space)"
        )
    together = int(settings.lmcache.size_gb * GIB) + encoded + taken
    if together > memory.total_bytes:
        images = f" + {gib(encoded)} for encoded images" if encoded else ""
        halved = "engine.dtype=bfloat16, " if settings.engine.get("dtype") == "float32" else ""
        raise SettingsError(
            f"decoders: engines on CPUs do not fit: {' + '.join(lines)} + "
            f"{settings.lmcache.size_gb:g} for LMCache{images} = {together / GIB:.1f} GiB, and "
            f"{memory.said()}; set fewer engines (prefillers=0 decoders=1 is the least), {halved}"
            "or a smaller model"
        )
    return replace(made, weights_bytes=weights, terms=tuple(lines), taken_bytes=taken)
