"""Chooses the host memory of LMCache's servers where engines run on GPUs. Pure."""

import math
from collections.abc import Sequence

from conserve.settings import Settings, SettingsError
from hetero.container import HostMemory
from hetero.engine_needs import GIB, gib
from hetero.gpu_layout import EnginePlan
from hetero.model_shape import ModelShape

# The median first prompt of a coding agent.
PROMPT_TOKENS = 24_500
# Handoffs that may be under way or unread at a time. With fewer than the least, a new one drops
# another before its decoder has read it.
_PROMPTS, _LEAST_PROMPTS = 16, 4
# Tokens after which a model with recurrent layers leaves their states in host memory. It does so in
# each turn, and the mean later turn of a coding agent adds 3,272.
SNAPSHOT_TOKENS = 3272
# LMCache's server looks each second: full to four fifths, it drops this share of what it holds.
EVICTED_SHARE = 0.1
KEPT_SHARE = 0.8 * (1 - EVICTED_SHARE)
# Host memory for parked conversations, relative to a decoder's KV (docs/lab/pausing.md).
_PARKED = 1.5
# LMCache's own page size, and the least one where servers share memory. There NIXL describes every
# page to every server, so the number of pages is bounded. A chunk takes whole pages.
_PAGE_BYTES, _SHARED_PAGE_BYTES, _MOST_PAGES = 4096, 64 * 1024, 2**17
# The rest is for loading weights and for the page cache.
_HOST_SHARE = 0.5
# vLLM's engine argument for its caches of prepared images, and its default in GiB; how much of the
# free memory all of a node's may take.
PREPARED, _PREPARED_GB, _PREPARED_SHARE = "mm_processor_cache_gb", 4.0, 0.25


def chunk_tokens(settings: Settings, gpu: bool) -> int:
    """Return the tokens in an LMCache chunk, a whole number of blocks; the same for all models.

    Only whole chunks are handed over. LMCache's default is 256; engines on CPUs have shorter
    prompts.
    """
    # vLLM's blocks have 128 tokens on CPUs. On GPUs they are small, except with Mamba layers
    # (`deployments.engine.kv_layers`).
    settings, *_ = settings.each.values()
    block = 1
    for arguments in (settings.engine, settings.decoders.engine, settings.prefillers.engine):
        block = math.lcm(block, int(arguments.get("block_size") or (1 if gpu else 128)))
    return -(-(256 if gpu else 128) // block) * block


def require_one_chunk(settings: Settings, gpu: bool) -> None:
    """Raise `SettingsError` if models want chunks of several sizes: a node has one server."""
    chunks = {name: chunk_tokens(own, gpu) for name, own in settings.each.items()}
    if len(set(chunks.values())) > 1:
        said = ", ".join(f"{tokens} tokens for {name}" for name, tokens in chunks.items())
        raise SettingsError(
            f"engine.block_size: LMCache's server has chunks of one size, and by models' blocks "
            f"these would have {said}; set engine.block_size={max(chunks.values())} for all"
        )


def page_bytes(size_gb: float, shared: bool) -> int:
    """Return the size of a server's page, a power of two; ``shared`` with other nodes' servers."""
    if not shared:
        return _PAGE_BYTES
    page = _SHARED_PAGE_BYTES
    while size_gb * GIB / page > _MOST_PAGES:
        page *= 2
    return page


def stored_bytes(kept: float, writers: int, chunk: int, page: int) -> float:
    """Return the host memory of one token, where a chunk takes whole pages.

    ``kept`` is what each worker keeps of it, ``writers`` the workers that each store their own
    chunk.
    """
    return writers * math.ceil(kept * chunk / page) * page / chunk


def token_bytes(settings: Settings, shape: ModelShape, plan: EnginePlan, size_gb: float) -> float:
    page = page_bytes(size_gb, settings.nodes == "several")
    kept = shape.kv_token_bytes() if plan.needs is None else plan.needs.kv_token_bytes
    writers = 1 if plan.needs is None else plan.workers // plan.needs.kv_copies
    chunk = chunk_tokens(settings, gpu=True)
    return stored_bytes(kept, writers, chunk, page) + math.prod(shape.states) / SNAPSHOT_TOKENS


def kept_tokens(size_gb: float, token: float) -> int:
    return int(KEPT_SHARE * size_gb * GIB / token)


def chosen_gb(
    settings: Settings,
    shape: ModelShape,
    plans: Sequence[EnginePlan],
    nodes: int,
    available_bytes: int,
) -> float:
    """Return the GiB of each node's server, for handoffs and for conversations that decoders park.

    The decoders are the last of ``plans``, spread evenly over ``nodes``. ``available_bytes`` is the
    free host memory of the node with the least.
    """
    decoders = plans[-1]
    here = -(-decoders.replicas // max(1, nodes))
    size = 0.0
    # Pages grow with the memory, and a token's size grows with the pages.
    while True:
        token = token_bytes(settings, shape, decoders, size / GIB)
        wanted = _PROMPTS * PROMPT_TOKENS * token / KEPT_SHARE
        if settings.parks and decoders.kv_tokens is not None:
            wanted = max(wanted, _PARKED * here * decoders.kv_tokens * token)
        wanted = min(wanted, _HOST_SHARE * available_bytes)
        if wanted <= size:
            break
        size = wanted
    # Whole GiB, unless there are none.
    return float(max(0.5, size // GIB if size >= GIB else 0.5))


def encoded_bytes(settings: Settings, shape: ModelShape | None) -> int:
    """Return a node's host memory for encoded images; 0 for a model that reads text only."""
    sees = shape is not None and shape.sees
    # As `deployments.node.node` reserves it.
    return round(settings.media.encoded_gb * 1e9) if sees else 0


def tower_bytes(plans: Sequence[EnginePlan], nodes: int) -> int:
    """Return a node's host memory for layers of engines' vision towers that are not on its GPUs."""
    each = [one.replicas * one.workers * one.needs.host_bytes for one in plans if one.needs]
    return -(-sum(each) // max(1, nodes))


def with_prepared(
    settings: Settings, shape: ModelShape | None, engines: int, available_bytes: int
) -> Settings:
    """Return the settings with smaller caches of prepared images where memory is short.

    ``engines`` is how many a node may have. Each has one cache in its server and one in its core,
    of 4 GiB by vLLM's default: for three engines, all that a machine of 24 GB has.
    """
    own = (settings.engine, settings.decoders.engine, settings.prefillers.engine)
    if shape is None or not shape.sees or any(PREPARED in one for one in own):
        return settings
    most = _PREPARED_SHARE * available_bytes / GIB / (2 * max(1, engines))
    size = max(0.1, int(10 * most) / 10)
    if size >= _PREPARED_GB:
        return settings
    return settings.model_copy(update={"engine": settings.engine | {PREPARED: size}})


def images_said(settings: Settings, tower: int = 0) -> str:
    """Return in words what a model that sees takes of a node's host memory.

    Args:
        tower: bytes for layers of vision towers (`tower_bytes`).
    """
    own = (settings.prefillers, settings.decoders)
    prepared = max(float((settings.engine | one.engine).get(PREPARED, _PREPARED_GB)) for one in own)
    layers = f", {gib(tower)} GiB for layers of vision towers" if tower else ""
    return (
        f"host memory for images: {settings.media.encoded_gb:g} GB a node for encoded ones"
        f"{layers}, and up to {prepared:g} GiB for prepared ones in each engine's server, and in "
        "its core"
    )


def capped_gb(size_gb: float, available_bytes: int) -> float:
    """Return the default size, or half of the free memory if that is less."""
    most = _HOST_SHARE * available_bytes / GIB
    return size_gb if size_gb <= most else max(0.5, int(2 * most) / 2)


def require_room(size_gb: float, encoded: int, memory: HostMemory, tower: int = 0) -> None:
    """Raise `SettingsError` if a server and what images take are larger than a node's memory."""
    if size_gb * GIB + encoded + tower > memory.total_bytes:
        raise SettingsError(f"{taken(size_gb, encoded, tower)}, and {memory.said()}; set less")


def taken(size_gb: float, encoded: int, tower: int = 0) -> str:
    images = f" and media.encoded_gb: {gib(encoded)}" if encoded else ""
    images += f" and layers by media.tower_layers: {gib(tower)}" if tower else ""
    return f"lmcache.size_gb: {size_gb:g}{images} GiB"


def too_small(size_gb: float, token: float) -> str | None:
    """Return a warning if histories would drop each other."""
    kept = kept_tokens(size_gb, token)
    if kept >= _LEAST_PROMPTS * PROMPT_TOKENS:
        return None
    enough = _LEAST_PROMPTS * PROMPT_TOKENS * token / KEPT_SHARE / GIB
    return (
        f"lmcache.size_gb: {size_gb:g} GiB keep {kept:,} tokens of this model's KV, and a coding "
        f"agent's first prompt has {PROMPT_TOKENS:,}: histories drop each other, and engines "
        f"compute them again; {enough:.0f} GiB or more keep {_LEAST_PROMPTS}"
    )
