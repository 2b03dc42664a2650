"""How much host memory LMCache's server gets where engines run on GPUs. Pure."""

from collections.abc import Sequence

from conserve.settings import Settings, SettingsError
from hetero.container import HostMemory
from hetero.gpu_layout import GIB, EnginePlan
from hetero.model_shape import ModelShape

# The median first prompt of a coding agent.
PROMPT_TOKENS = 24_500
# So many handoffs may be under way or unread at a time; with fewer than the least, one that comes
# drops another before its decoder has read it.
_PROMPTS, _LEAST_PROMPTS = 16, 4
# LMCache's server drops a fifth of what it holds when it is full to four fifths.
KEPT_SHARE = 0.64
# Of a decoder's KV, for parked conversations beside it (docs/scheduling.md).
_PARKED = 1.5
# Engines load weights through the host's memory, and page caches want some.
_HOST_SHARE = 0.5


def token_bytes(shape: ModelShape, plan: EnginePlan) -> float:
    """Bytes of a token's KV over all workers of an engine."""
    if plan.needs is None:
        return shape.kv_token_bytes()
    return plan.needs.kv_token_bytes * plan.workers


def kept_tokens(size_gb: float, token: float) -> int:
    """Tokens that a server of this size always keeps."""
    return int(KEPT_SHARE * size_gb * GIB / token)


def chosen_gb(
    settings: Settings,
    shape: ModelShape,
    plans: Sequence[EnginePlan],
    nodes: int,
    available_bytes: int,
) -> float:
    """GiB for the server of each node: for handoffs, and for what decoders park.

    Args:
        plans: the engines, the decoders' last.
        nodes: with GPUs; decoders are on all of them alike.
        available_bytes: host memory that is free on the node that has least.
    """
    decoders = plans[-1]
    token = token_bytes(shape, decoders)
    wanted = _PROMPTS * PROMPT_TOKENS * token / KEPT_SHARE
    if settings.parks and decoders.kv_bytes is not None:
        here = -(-decoders.replicas // max(1, nodes))
        wanted = max(wanted, _PARKED * here * decoders.workers * decoders.kv_bytes)
    size = min(wanted, _HOST_SHARE * available_bytes)
    # Whole GiB, unless there are none.
    return float(max(0.5, size // GIB if size >= GIB else 0.5))


def capped_gb(size_gb: float, available_bytes: int) -> float:
    """GiB for a server whose size nobody has set: at most half of the memory that is free."""
    most = _HOST_SHARE * available_bytes / GIB
    return size_gb if size_gb <= most else max(0.5, int(2 * most) / 2)


def require_room(size_gb: float, memory: HostMemory) -> None:
    """Refuse a server that is larger than its node's memory.

    Raises:
        SettingsError: says how much there is.
    """
    if size_gb * GIB > memory.total_bytes:
        raise SettingsError(f"lmcache.size_gb: {size_gb:g} GiB, and {memory.said()}; set less")


def too_small(size_gb: float, token: float) -> str | None:
    """A line for the log, if handoffs would drop each other."""
    kept = kept_tokens(size_gb, token)
    if kept >= _LEAST_PROMPTS * PROMPT_TOKENS:
        return None
    enough = _LEAST_PROMPTS * PROMPT_TOKENS * token / KEPT_SHARE / GIB
    return (
        f"lmcache.size_gb: {size_gb:g} GiB keep {kept:,} tokens of this model's KV, and a coding "
        f"agent's first prompt has {PROMPT_TOKENS:,}: handoffs will drop each other, and decoders "
        f"compute those prompts; {enough:.0f} GiB or more keep {_LEAST_PROMPTS}"
    )
