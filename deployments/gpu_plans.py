"""The application's plan: for this machine before anything runs, or for given nodes with GPUs."""

import os
from collections.abc import Sequence
from dataclasses import replace

from autoscale.capacity.served import profile_off
from conserve.adapters import with_adapters
from conserve.settings import Settings, SettingsError
from deployments.engine_arguments import require_one_split
from deployments.model_files import ModelMissing, model_shape
from hetero import cpu_plan
from hetero.cards import cards_here
from hetero.container import cpu_dtype, host_memory
from hetero.cpu_plan import CpuPlan
from hetero.gpu_division import divided
from hetero.gpu_plan import GpuNode, GpuPlan, gpus_of, plan_each
from hetero.gpu_room import require_shares, require_slots, short_of_gpus
from hetero.host_memory import require_one_chunk
from hetero.model_shape import ModelShape, ModelUnknown
from hetero.tiers import NodeOffer, missing


def here() -> GpuNode:
    """Return this machine as a cluster of one node that has not started yet."""
    cards = cards_here()
    resources = {"CPU": float(os.cpu_count() or 1), "GPU": float(len(cards))}
    offer = NodeOffer("of this machine", resources, {})
    memory = host_memory()
    return GpuNode(offer, cards, memory.available_bytes, memory)


def plan_on(
    settings: Settings, nodes: Sequence[GpuNode], model_is_here: bool
) -> tuple[Settings, GpuPlan]:
    """Return the plan for these nodes, as if the application started there now.

    Raises `SettingsError` if the engines do not fit, there are too few GPUs, or there is no such
    model on this machine although engines read it here (``model_is_here``).
    """
    settings = settings.with_each(settings.for_each(with_adapters))
    settings.for_each(require_one_split)
    chosen = counted(settings, gpus_of(nodes))
    offered = [node.offer for node in nodes]
    short = missing(chosen, True, offered) + short_of_gpus(chosen, offered)
    if short:
        raise SettingsError(*short)
    return planned(chosen.on_nodes(len(nodes)), nodes, model_is_here)


def counted(settings: Settings, gpus: int) -> Settings:
    """Return the settings with all models' engines counted for as many GPUs as Ray has.

    Raises `SettingsError` if there are too few, or parts or SM slots cannot be given.
    """
    weights = {}
    if settings.models:
        shapes = settings.for_each(lambda own: _looked_for(own, model_is_here=False)[0])
        weights = {name: shape.weights_bytes for name, shape in shapes.items() if shape is not None}
    chosen = divided(settings, gpus, weights)
    chosen.for_each(require_shares)
    require_slots(chosen)
    return chosen


def planned(
    settings: Settings, nodes: Sequence[GpuNode], model_is_here: bool
) -> tuple[Settings, GpuPlan]:
    """Return the plan for these nodes, once engines are counted; otherwise as `plan_on`."""
    chosen, made = plan_each(
        settings, nodes, settings.for_each(lambda own: _looked_for(own, model_is_here))
    )
    require_one_chunk(chosen, gpu=True)
    return chosen, made


def planned_on_cpus(settings: Settings) -> tuple[Settings, CpuPlan]:
    """Return the plan for engines on this machine's CPUs, as if the application started there now.

    Raises `SettingsError` if vLLM would not start the engines, or there is no such model.
    """
    require_one_chunk(settings, gpu=False)
    made: CpuPlan | None = None

    def plan_on_cpus(own: Settings) -> Settings:
        nonlocal made
        own, dtype = with_cpu_dtype(own, model_is_here=True)
        shape, _ = _looked_for(own, model_is_here=True)
        own, made = cpu_plan.plan(own, shape, host_memory(), made)
        made = replace(made, dtype=dtype)
        return own

    settings = settings.with_each(settings.for_each(plan_on_cpus))
    assert made is not None
    lmcache = settings.lmcache.model_copy(update={"size_gb": made.size_gb})
    return settings.with_common(lmcache=lmcache), made


def with_cpu_dtype(settings: Settings, model_is_here: bool) -> tuple[Settings, str]:
    """Return the settings with the dtype of all engines on CPUs, unless it is set, and why.

    It is this CPU's also on several nodes: handed-over KV is taken as it was stored.
    """
    dtype, why = cpu_dtype()
    off = profile_off(settings, dtype)
    arguments = settings.engine | settings.decoders.engine
    if (given := arguments.get("dtype")) is not None:
        return settings, f"{given} as set; {why}{off}"
    if dtype == "float32":
        shape, unknown = _looked_for(settings, model_is_here)
        # Most methods of quantisation refuse float32.
        if shape is None or shape.quantised or "quantization" in arguments:
            dtype, why = "bfloat16", f"{unknown or 'the model is quantised'}; {why}, so it is slow"
    engine = {**settings.engine, "dtype": dtype}
    return settings.model_copy(update={"engine": engine}), f"{dtype}: {why}{off}"


def _looked_for(settings: Settings, model_is_here: bool) -> tuple[ModelShape | None, str]:
    """Return the model's shape, or why it is not known."""
    try:
        shape = model_shape(settings)
        if settings.encoders.replicas and not shape.sees:
            raise SettingsError(
                f"encoders: {settings.model_id} reads text only, so there is nothing to encode; "
                "set encoders=0"
            )
        if settings.media.tower_layers is not None and not shape.sees:
            raise SettingsError(
                f"media.tower_layers: {settings.model_id} reads text only, so it has no vision "
                "tower; unset it"
            )
        return shape, ""
    except ModelMissing as error:
        if model_is_here:
            raise SettingsError(f"model: {error}") from None
        return None, f"model: {error}"
    except ModelUnknown as error:
        return None, f"model: {error}"
