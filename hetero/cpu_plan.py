"""Works out what engines on CPUs take of a machine's memory, and whether they fit. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from conserve.engines import engine_arguments, engine_environment
from conserve.settings import Settings, SettingsError
from hetero import host_memory
from hetero.container import HostMemory
from hetero.gpu_layout import GIB, needs, require_longest, roles, workers
from hetero.model_shape import ModelShape

_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Tells what an application on CPUs is going to take of its machine.

    Attributes:
        kv_gb: KV space of each worker of a role's engines, in GiB, by the role's setting.
        weights_bytes: of all engines together; None: not known.
        size_gb: host memory of LMCache's server.
        memory: of the machine.
    """

    kv_gb: Mapping[str, float]
    weights_bytes: int | None
    size_gb: float
    memory: HostMemory


def plan(
    settings: Settings, shape: ModelShape | None, memory: HostMemory
) -> tuple[Settings, CpuPlan]:
    """Return the settings with LMCache's memory chosen, and what engines take of this machine.

    Args:
        shape: of the model; None: not known.
        memory: of the machine that all engines run on.

    Raises:
        SettingsError: vLLM would not start the engines, or they are larger than the machine.
    """
    lmcache = settings.lmcache
    if "size_gb" in lmcache.model_fields_set:
        host_memory.require_room(lmcache.size_gb, memory)
    else:
        size_gb = host_memory.capped_gb(lmcache.size_gb, memory.available_bytes)
        lmcache = lmcache.model_copy(update={"size_gb": size_gb})
        settings = settings.model_copy(update={"lmcache": lmcache})
    spaces = {name: _kv_bytes(settings, name) for name, _ in roles(settings)}
    weights = None
    if shape is not None:
        weights = _require_fit(settings, shape, spaces, memory)
    kv_gb = {name: space / GIB for name, space in spaces.items()}
    return settings, CpuPlan(kv_gb, weights, lmcache.size_gb, memory)


def _kv_bytes(settings: Settings, name: str) -> int:
    """KV space of each worker of a role's engines, as vLLM is told it."""
    own = dict(roles(settings))[name]
    told = (settings.engine | own.engine).get("kv_cache_memory_bytes")
    if told is not None and _KV_SPACE not in own.env:
        return int(told)
    environment = engine_environment(settings.model, gpu=False) | own.env
    try:
        return int(environment[_KV_SPACE]) * GIB
    except ValueError:
        raise SettingsError(f"{name}.env.{_KV_SPACE}: give a whole number of GiB") from None


def _require_fit(
    settings: Settings, shape: ModelShape, spaces: Mapping[str, int], memory: HostMemory
) -> int:
    weights = 0
    lines = []
    taken = int(settings.lmcache.size_gb * GIB)
    for name, own in roles(settings):
        arguments = engine_arguments(settings.model, gpu=False) | settings.engine | own.engine
        # Of the weights and KV alone: on a CPU nothing is set apart for steps.
        counted = {"max_num_batched_tokens": 0} | arguments
        each = replace(needs(shape, counted, card_bytes=0), reserve_bytes=0)
        if spaces[name] and not each.at_most and "num_gpu_blocks_override" not in arguments:
            told = "kv_cache_memory_bytes" in arguments and _KV_SPACE not in own.env
            setting = "engine.kv_cache_memory_bytes" if told else f"env.{_KV_SPACE}"
            require_longest(f"{name}.{setting}", spaces[name], each)
        count = own.replicas * workers(settings, own)
        weights += count * each.weights_bytes
        taken += count * (each.weights_bytes + spaces[name])
        lines.append(
            f"{own.replicas} {name} x ({each.weights_bytes / GIB:.1f} weights + "
            f"{spaces[name] / GIB:.1f} KV space)"
        )
    if taken > memory.total_bytes:
        raise SettingsError(
            f"engines on CPUs do not fit: {' + '.join(lines)} + {settings.lmcache.size_gb:g} for "
            f"LMCache = {taken / GIB:.1f} GiB, and {memory.said()}; set fewer engines "
            "(placement=collocated decoders=1 is the least), or a smaller model"
        )
    return weights
