"""Plans an application on GPUs: engines, their memory, and host memory for KV. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from conserve.settings import Settings, SettingsError
from hetero import host_memory
from hetero.cards import Card
from hetero.container import HostMemory
from hetero.engine_needs import GIB, gib
from hetero.gpu_division import shared_by_needs
from hetero.gpu_layout import WITHOUT_VIDEOS, EnginePlan, arguments_of, with_memory
from hetero.model_shape import ModelShape
from hetero.tiers import NodeOffer, is_offered, role_tier

# Models whose layers keep a state have blocks of a multiple of it, in tokens. vLLM makes blocks at
# least as large as a state (544 or 784 tokens, say), and accepts larger ones. LMCache's chunks,
# which are set before an engine has loaded, follow the size.
_STATE_BLOCK_TOKENS = 1024
# Share of a GPU that other processes may use before engines that share it are warned.
_OTHERS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A node and its GPUs; ``cards`` is empty where Ray has some that cannot be looked at."""

    offer: NodeOffer
    cards: tuple[Card, ...]
    available_bytes: int  # Free host memory.
    memory: HostMemory | None = None


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The plan of an application on GPUs."""

    gpus: int
    cards: tuple[Card, ...]  # The GPUs that could be looked at.
    engines: tuple[EnginePlan, ...]
    size_gb: float  # Host memory of each node's LMCache server, in GiB.
    kept_tokens: int | None  # Tokens that it always keeps.
    notes: tuple[str, ...]  # For operators, one line each.
    memory: HostMemory | None = None  # That of the node with the least.
    images: str = ""  # Host memory for images, in words; empty: the model reads text only.
    roles: str = ""  # The work of each role under the placement, in words.
    sums: str = ""  # What several models take together, in words.

    def lines(self) -> list[str]:
        said = []
        for one in self.engines:
            parts = [f"{one.replicas} x {one.model}{one.role}, {one.num_gpus:g} GPU a worker"]
            if one.sm_slots is not None:
                parts.append(f"{one.sm_slots} of ten SM slots")
            if one.needs is not None:
                parts.append(f"weights {gib(one.needs.weights_bytes)}")
                parts.append(f"reserve {gib(one.needs.reserve_bytes)}")
                if one.needs.tower is not None:
                    parts.append(f"encoder cache {gib(one.needs.cache_bytes)}")
            if one.kv_bytes is not None:
                told = "" if one.fixed else " (estimated: vLLM measures)"
                parts.append(f"KV {gib(one.kv_bytes)} GiB{told}")
            if one.kv_tokens is not None:
                parts.append(f"{one.kv_tokens:,} tokens each")
            said.append(", ".join(parts))
        kept = "" if self.kept_tokens is None else f", {self.kept_tokens:,} tokens at least"
        there = f"; {self.memory.said()}" if self.memory else ""
        said.append(f"host memory for KV: {self.size_gb:g} GiB a node{kept}{there}")
        return [*said, *filter(None, (self.sums, self.roles, self.images))]


def plan(
    settings: Settings, nodes: Sequence[GpuNode], shape: ModelShape | None, why_unknown: str = ""
) -> tuple[Settings, GpuPlan]:
    """Return a model's settings with all GPU and host memory chosen, and the plan.

    Args:
        settings: from `gpu_layout.with_counts`.
        nodes: the cluster's nodes with GPUs.
        shape: None: not known, and ``why_unknown`` says why.

    Raises:
        SettingsError: the engines do not fit.
    """
    notes = []
    try:
        chosen, engines = with_memory(settings, shape, _cards(settings, nodes))
    except SettingsError as error:
        raise SettingsError(*error.problems, *filter(None, (why_unknown,))) from None
    if shape is not None and shape.recurrent:
        chosen = _with_large_blocks(chosen, shape)
    if why_unknown:
        notes.append(f"{why_unknown}; so what engines hold is not known, nor how much to keep")
    elif shape is not None and shape.estimated:
        notes.append("the weights' size is computed from config.json: their files were not seen")
    if any(one.num_gpus < 1 for one in engines):
        notes += [*_sharing(chosen, engines), *_taken_by_others(nodes)]
    if shape is not None and shape.tower_unknown:
        notes.append(
            f"{shape.tower_unknown}: its memory is not counted, nor vLLM's encoder cache; where "
            "engines share a GPU, leave room for both (a smaller engine.gpu_memory_utilization)"
        )
    notes += [*_with_videos(engines), *_short(engines)]
    if not settings.models:
        notes += _idle(chosen, engines, nodes)
    chosen, kept, warnings = _with_host_memory(chosen, shape, engines, nodes)
    sees = shape is not None and shape.sees
    tower = host_memory.tower_bytes(engines, len(nodes))
    return chosen, GpuPlan(
        gpus=gpus_of(nodes),
        cards=tuple(card for node in nodes for card in node.cards),
        engines=tuple(engines),
        size_gb=chosen.lmcache.size_gb,
        kept_tokens=kept,
        notes=(*notes, *warnings),
        memory=_least(nodes).memory if nodes else None,
        images=host_memory.images_said(chosen, tower) if sees else "",
        roles=_roles_do(chosen),
    )


def plan_each(
    settings: Settings,
    nodes: Sequence[GpuNode],
    shapes: Mapping[str, tuple[ModelShape | None, str]],
) -> tuple[Settings, GpuPlan]:
    """Return the settings with each model's planned, and one plan of all; otherwise as `plan`.

    Args:
        settings: from `gpu_division.divided`.
        shapes: by model.
    """
    cards = {name: _cards(own, nodes) for name, own in settings.each.items()}
    settings = shared_by_needs(settings, {name: one for name, (one, _) in shapes.items()}, cards)

    def made() -> dict[str, tuple[Settings, GpuPlan]]:
        return settings.for_each(lambda own: plan(own, nodes, *shapes[own.model_id]))

    found = made()
    chosen, only = next(iter(found.values()))
    if not settings.models:
        return chosen, only
    sizes = ""
    if "size_gb" not in settings.lmcache.model_fields_set:
        wanted = sum(one.size_gb for _, one in found.values())
        least = min((node.available_bytes for node in nodes), default=0)
        size = {"size_gb": host_memory.capped_gb(wanted, least)}
        each = " + ".join(f"{one.size_gb:g} for {name}" for name, (_, one) in found.items())
        sizes = f"of host memory for KV, {each} = {wanted:g} GiB are wanted"
        settings = settings.with_common(lmcache=settings.lmcache.model_copy(update=size))
        # What a server keeps follows its size.
        found = made()
    plans = [one for _, one in found.values()]
    engines = tuple(one for some in plans for one in some.engines)
    kept = [one.kept_tokens or 0 for one in plans]
    shared = [set(one.notes) for one in plans]
    notes = [note if note in set.intersection(*shared) else f"{name}: {note}"
             for name, (_, one) in found.items() for note in one.notes]  # fmt: skip
    return settings.with_each({name: own for name, (own, _) in found.items()}), replace(
        only,
        engines=engines,
        size_gb=plans[0].size_gb,
        kept_tokens=min(kept) or None,
        notes=(*dict.fromkeys(notes), *_idle(settings, engines, nodes)),
        images=next(filter(None, (one.images for one in plans)), ""),
        roles="; ".join(dict.fromkeys(one.roles for one in plans)),
        sums=_sums(engines, sizes),
    )


def _sums(engines: Sequence[EnginePlan], wanted: str) -> str:
    taken = [(one, one.needs.fixed_bytes + (one.kv_bytes or 0)) for one in engines if one.needs]
    each = [f"a {one.model}{one.role} takes {gib(bytes_)} GiB" for one, bytes_ in taken]
    said = [f"of a GPU, {', '.join(each)}"] if each else []
    parts = [(one, bytes_) for one, bytes_ in taken if one.num_gpus < 1]
    if parts and sum(one.replicas * one.num_gpus for one, _ in parts) <= 1:
        shared = sum(one.replicas * bytes_ for one, bytes_ in parts)
        said.append(f"{gib(shared)} together of the one that is shared")
    return "; ".join([*said, *filter(None, (wanted,))])


def _cards(settings: Settings, nodes: Sequence[GpuNode]) -> dict[str, Card | None]:
    """Return the smallest GPU that each role may get; None: not known."""
    found: dict[str, Card | None] = {}
    for name, own in settings.roles:
        tier = role_tier(settings, own, gpu=True)
        places = [node for node in nodes if is_offered(tier, node.offer)]
        cards = [card for node in places for card in node.cards]
        seen = places and all(node.cards for node in places)
        found[name] = min(cards, key=lambda card: card.memory_bytes) if seen else None
    return found


def _roles_do(settings: Settings) -> str:
    policy = settings.policy_class
    if not settings.prefiller_replicas:
        return "each engine prefills and decodes the turns of its own conversations"
    if policy.hosts_prefillers:
        return (
            "prefillers and decoders both keep conversations, and prefill and decode their turns; "
            "prefillers take fewer of them while first prompts keep them busy"
        )
    if not policy.only_first_prompts and not policy.prefills_later_turns:
        return "prefillers prefill all turns; decoders only decode"
    later = " and some later ones" if policy.prefills_later_turns else ""
    return f"prefillers prefill first turns{later}; decoders do everything else"


def _sharing(settings: Settings, engines: Sequence[EnginePlan]) -> list[str]:
    said = "engines that share a GPU take turns unless MPS runs (nvidia-cuda-mps-control -d first)"
    last = engines[-1]
    if last.needs is None or last.budget_bytes is None:
        return [said]
    shared = sum(one.replicas * (one.kv_tokens or 0) for one in engines)
    gpus = settings.gpus or math.ceil(sum(one.replicas * one.num_gpus for one in engines))
    alone = last.budget_bytes / last.num_gpus - last.needs.fixed_bytes
    tokens = gpus * int(alone / last.needs.kv_token_bytes)
    return [f"{said}; together they hold {shared:,} tokens, and one engine a GPU holds {tokens:,}"]


def _taken_by_others(nodes: Sequence[GpuNode]) -> list[str]:
    return [
        f"{card.name}, node {node.offer.name}: {gib(card.used_bytes)} of "
        f"{gib(card.memory_bytes)} GiB are in use; an engine that finds too little does "
        "not start"
        for node in nodes
        for card in node.cards
        if card.used_bytes > _OTHERS_SHARE * card.memory_bytes
    ]


def _with_videos(engines: Sequence[EnginePlan]) -> list[str]:
    towers = [one.needs.tower for one in engines if one.needs is not None]
    videos = [one for one in towers if one is not None and one.has_video]
    if not videos:
        return []
    most = max(videos, key=lambda one: one.encode_bytes)
    return [
        f"each engine has {gib(most.encode_bytes)} GiB to encode {most.batch}, as vLLM does when "
        f"it starts; if agents send no videos, {WITHOUT_VIDEOS} leaves most of it to KV"
    ]


def _short(engines: Sequence[EnginePlan]) -> list[str]:
    return [
        f"{one.role}: room for some {one.kv_tokens:,} tokens, and vLLM does not start with less "
        f"than the longest sequence's {one.needs.least_tokens:,}; set engine.max_model_len"
        for one in engines
        if one.needs is not None and one.kv_tokens is not None and not one.fixed
        and one.kv_tokens < one.needs.least_tokens
    ]  # fmt: skip


def _idle(settings: Settings, engines: Sequence[EnginePlan], nodes: Sequence[GpuNode]) -> list[str]:
    there = gpus_of(nodes)
    if any(one.num_gpus < 1 for one in engines):
        used = settings.gpus or there
    else:
        used = int(sum(one.replicas * one.workers * one.num_gpus for one in engines))
    return [f"{there - used} of {there} GPUs have no engine"] if used < there else []


def _with_large_blocks(settings: Settings, shape: ModelShape) -> Settings:
    arguments = [settings.engine, settings.decoders.engine, settings.prefillers.engine]
    if any("block_size" in one for one in arguments):
        return settings
    block = _STATE_BLOCK_TOKENS
    for one in (
        arguments_of(settings, settings.decoders),
        arguments_of(settings, settings.prefillers),
    ):
        tensor = int(one.get("tensor_parallel_size", 1))
        kept_as = str(one.get("kv_cache_dtype", "auto"))
        token = shape.kv_token_bytes(tensor, kept_as) / sum(kind.layers for kind in shape.kv)
        states = math.ceil(shape.states[1] / tensor / token / _STATE_BLOCK_TOKENS)
        block = max(block, states * _STATE_BLOCK_TOKENS)
    engine = settings.engine | {"block_size": block}
    return settings.model_copy(update={"engine": engine})


def _with_host_memory(
    settings: Settings,
    shape: ModelShape | None,
    engines: Sequence[EnginePlan],
    nodes: Sequence[GpuNode],
) -> tuple[Settings, int | None, list[str]]:
    lmcache, encoded = settings.lmcache, host_memory.encoded_bytes(settings, shape)
    tower = host_memory.tower_bytes(engines, len(nodes))
    warnings = []
    if "size_gb" in lmcache.model_fields_set:
        for node in nodes:
            if node.memory is not None:
                host_memory.require_room(lmcache.size_gb, encoded, node.memory, tower)
        if nodes and lmcache.size_gb * GIB + encoded + tower > _least(nodes).available_bytes:
            warnings.append(
                f"{host_memory.taken(lmcache.size_gb, encoded, tower)}, and a node has "
                f"{gib(_least(nodes).available_bytes)} GiB available: Linux may end LMCache's "
                "server, or an engine, for want of memory"
            )
    elif nodes:
        available = _least(nodes).available_bytes - encoded - tower
        if shape is None:
            size_gb = host_memory.capped_gb(lmcache.size_gb, available)
        else:
            size_gb = host_memory.chosen_gb(settings, shape, engines, len(nodes), available)
        lmcache = lmcache.model_copy(update={"size_gb": size_gb})
        settings = settings.model_copy(update={"lmcache": lmcache})
    if nodes:
        models = max(1, len(settings.models))
        here = -(-models * sum(one.replicas for one in engines) // len(nodes))
        free = _least(nodes).available_bytes
        settings = host_memory.with_prepared(settings, shape, here, free)
    if shape is None:
        return settings, None, warnings
    token = host_memory.token_bytes(settings, shape, engines[-1], lmcache.size_gb)
    kept = host_memory.kept_tokens(lmcache.size_gb, token)
    small = host_memory.too_small(lmcache.size_gb, token)
    return settings, kept, [*warnings, *([small] if small else [])]


def gpus_of(nodes: Sequence[GpuNode]) -> int:
    return int(sum(node.offer.resources.get("GPU", 0) for node in nodes))


def _least(nodes: Sequence[GpuNode]) -> GpuNode:
    return min(nodes, key=lambda node: node.available_bytes)
