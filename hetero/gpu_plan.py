"""The whole plan of an application on GPUs: engines, their memory, and what the host keeps. Pure.

What there is comes in as `GpuNode`, whoever looked: `conserve serve --plan` on its own machine, or
the application on its cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from conserve.settings import Settings, SettingsError
from hetero import host_memory
from hetero.cards import Card
from hetero.container import HostMemory
from hetero.gpu_layout import GIB, EnginePlan, roles, with_memory
from hetero.model_shape import ModelShape
from hetero.tiers import NodeOffer, is_offered, role_tier

# Tokens of a block where layers keep a state: vLLM makes blocks at least as large as one, 544 or
# 784 tokens for instance, which is known when an engine has loaded. It keeps to larger ones that it
# is told, and LMCache's chunks, which are set before that, follow those.
_STATE_BLOCK_TOKENS = 1024
# Of a GPU that engines share, what others may have without being in their way.
_OTHERS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A node and its GPUs.

    Attributes:
        cards: none where they cannot be looked at, though Ray has some.
        available_bytes: host memory that is free.
        memory: all that is known of it; None: nothing else.
    """

    offer: NodeOffer
    cards: tuple[Card, ...]
    available_bytes: int
    memory: HostMemory | None = None


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Tells what an application on GPUs is going to be.

    Attributes:
        gpus: how many there are.
        cards: them, as far as they can be looked at.
        engines: by role.
        size_gb: host memory of each node's LMCache server, and the tokens that it keeps, at least
            (None: not known).
        memory: of the node that has the least; None: not known.
        notes: what an operator should know, a line each.
    """

    gpus: int
    cards: tuple[Card, ...]
    engines: tuple[EnginePlan, ...]
    size_gb: float
    kept_tokens: int | None
    notes: tuple[str, ...]
    memory: HostMemory | None = None

    def lines(self) -> list[str]:
        """The plan for a log."""
        said = []
        for one in self.engines:
            parts = [f"{one.replicas} x {one.role}, {one.num_gpus:g} GPU a worker"]
            if one.sm_slots is not None:
                parts.append(f"{one.sm_slots} of ten SM slots")
            if one.needs is not None:
                parts.append(f"weights {gib(one.needs.weights_bytes)}")
                parts.append(f"reserve {gib(one.needs.reserve_bytes)}")
            if one.kv_bytes is not None:
                told = "" if one.fixed else " (estimated: vLLM measures)"
                parts.append(f"KV {gib(one.kv_bytes)} GiB{told}")
            if one.kv_tokens is not None:
                parts.append(f"{one.kv_tokens:,} tokens each")
            said.append(", ".join(parts))
        kept = "" if self.kept_tokens is None else f", {self.kept_tokens:,} tokens at least"
        there = f"; {self.memory.said()}" if self.memory else ""
        said.append(f"host memory for handoffs: {self.size_gb:g} GiB a node{kept}{there}")
        return said


def plan(
    settings: Settings,
    nodes: Sequence[GpuNode],
    shape: ModelShape | None,
    why_unknown: str = "",
) -> tuple[Settings, GpuPlan]:
    """Settings with nothing left to choose of GPUs' and hosts' memory, and what they come to.

    Args:
        settings: as `gpu_layout.with_counts` left them.
        nodes: those of the cluster that have GPUs.
        shape: of the model; None: not known, and ``why_unknown`` says why.

    Raises:
        SettingsError: the engines do not fit; says the sums.
    """
    try:
        chosen, engines = with_memory(settings, shape, _card_bytes(settings, nodes))
    except SettingsError as error:
        raise SettingsError(f"{error}\n  {why_unknown}" if why_unknown else str(error)) from None
    if shape is not None and shape.recurrent:
        chosen = _with_large_blocks(chosen)
    notes = []
    if why_unknown:
        notes.append(f"{why_unknown}; so what engines hold is not known, nor how much to keep")
    elif shape is not None and shape.estimated:
        notes.append("the weights' size is computed from config.json: their files were not seen")
    if any(one.num_gpus < 1 for one in engines):
        notes += _taken_by_others(nodes)
    notes += _short(engines)
    notes += _idle(chosen, engines, nodes)
    chosen, kept, warnings = _with_host_memory(chosen, shape, engines, nodes)
    notes += warnings
    cards = tuple(card for node in nodes for card in node.cards)
    gpus = int(sum(node.offer.resources.get("GPU", 0) for node in nodes))
    size_gb = chosen.lmcache.size_gb
    memory = _least(nodes).memory if nodes else None
    return chosen, GpuPlan(gpus, cards, tuple(engines), size_gb, kept, tuple(notes), memory)


def gib(count: float) -> str:
    """Bytes as GiB, for people."""
    return f"{count / GIB:.1f}"


def _card_bytes(settings: Settings, nodes: Sequence[GpuNode]) -> dict[str, int | None]:
    """Return the memory of the smallest GPU that a role may get; None where one cannot be looked
    at.
    """
    found: dict[str, int | None] = {}
    for name, own in roles(settings):
        tier = role_tier(settings, own, gpu=True)
        places = [node for node in nodes if is_offered(tier, node.offer)]
        sizes = [card.memory_bytes for node in places for card in node.cards]
        seen = places and all(node.cards for node in places)
        found[name] = min(sizes) if seen else None
    return found


def _taken_by_others(nodes: Sequence[GpuNode]) -> list[str]:
    return [
        f"{card.name}, node {node.offer.name}: {gib(card.used_bytes)} of "
        f"{gib(card.memory_bytes)} GiB are taken by others; an engine that finds too little does "
        "not start"
        for node in nodes
        for card in node.cards
        if card.used_bytes > _OTHERS_SHARE * card.memory_bytes
    ]


def _short(engines: Sequence[EnginePlan]) -> list[str]:
    """Return the engines that measure, and may find too little for the longest sequence."""
    return [
        f"{one.role}: room for some {one.kv_tokens:,} tokens, and vLLM does not start with less "
        f"than the longest sequence's {one.needs.least_tokens:,}; set engine.max_model_len"
        for one in engines
        if one.needs is not None and one.kv_tokens is not None and not one.fixed
        and one.kv_tokens < one.needs.least_tokens
    ]  # fmt: skip


def _idle(settings: Settings, engines: Sequence[EnginePlan], nodes: Sequence[GpuNode]) -> list[str]:
    there = int(sum(node.offer.resources.get("GPU", 0) for node in nodes))
    if any(one.num_gpus < 1 for one in engines):
        used = settings.gpus or there
    else:
        used = int(sum(one.replicas * one.workers * one.num_gpus for one in engines))
    return [f"{there - used} of {there} GPUs have no engine"] if used < there else []


def _with_large_blocks(settings: Settings) -> Settings:
    own = (settings.engine, settings.decoders.engine, settings.prefillers.engine)
    if any("block_size" in one for one in own):
        return settings
    engine = settings.engine | {"block_size": _STATE_BLOCK_TOKENS}
    return settings.model_copy(update={"engine": engine})


def _with_host_memory(
    settings: Settings,
    shape: ModelShape | None,
    engines: Sequence[EnginePlan],
    nodes: Sequence[GpuNode],
) -> tuple[Settings, int | None, list[str]]:
    lmcache = settings.lmcache
    warnings = []
    if "size_gb" in lmcache.model_fields_set:
        for node in nodes:
            if node.memory is not None:
                host_memory.require_room(lmcache.size_gb, node.memory)
        if nodes and lmcache.size_gb * GIB > _least(nodes).available_bytes:
            warnings.append(
                f"lmcache.size_gb: {lmcache.size_gb:g} GiB, and a node has "
                f"{gib(_least(nodes).available_bytes)} GiB available: Linux may end LMCache's "
                "server, or an engine, for want of memory"
            )
    elif nodes:
        available = _least(nodes).available_bytes
        if shape is None:
            size_gb = host_memory.capped_gb(lmcache.size_gb, available)
        else:
            size_gb = host_memory.chosen_gb(settings, shape, engines, len(nodes), available)
        lmcache = lmcache.model_copy(update={"size_gb": size_gb})
        settings = settings.model_copy(update={"lmcache": lmcache})
    if shape is None:
        return settings, None, warnings
    token = host_memory.token_bytes(settings, shape, engines[-1], lmcache.size_gb)
    kept = host_memory.kept_tokens(lmcache.size_gb, token)
    small = host_memory.too_small(lmcache.size_gb, token)
    return settings, kept, [*warnings, *([small] if small else [])]


def _least(nodes: Sequence[GpuNode]) -> GpuNode:
    return min(nodes, key=lambda node: node.available_bytes)
