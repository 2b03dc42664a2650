"""Reads a server's own counters, as its ``/metrics`` has them before and after a run.

They contain whatever else the server served meanwhile. Figures that are not known are None.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# The counters that are read, by the fields that they come to.
_NAMES = {
    "handoffs": "conserve_handoffs_total",
    "handoff_tokens": "conserve_handoff_tokens_total",
    "loaded_tokens": "conserve_prefiller_loaded_tokens_total",
    "later_prefills": "conserve_later_prefills_total",
    "moves": "conserve_moves_total",
    "cold_prefill_tokens": "conserve_cold_prefill_tokens_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
}
NAMES = tuple(_NAMES.values())
_TIER_ENERGY = "conserve_gpu_energy_joules_total"
_TIER_TOKENS = "conserve_computed_tokens_total"


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The server's own figures of a run; None: not available.

    Attributes:
        handoffs: turns for which a decoder took KV over.
        handoff_tokens: tokens of KV that moved, to decoders and to prefillers.
        moves: conversations bound again because their decoder was lost.
        cold_prefill_tokens: tokens of first turns that were prefilled on a prefiller.
        prefix_cache_share: share of the prompt tokens that vLLM's engines found in their own prefix
            cache.
        kv_shares: what of decoders' KV space, over time, each of `conserve.costs.TERMS` took; empty
            where that was not simulated.
        shared_found_tokens: prompt tokens that were not computed because other conversations begin
            with them, too; only known where that was simulated.
        tier_energy_j, tier_tokens_per_j: of the GPUs of each tier, and of the tokens that its
            engines prefilled or decoded; empty without GPUs.
    """

    handoffs: float | None = None
    handoff_tokens: float | None = None
    handoff_tokens_per_conversation: float | None = None
    handoff_bytes: float | None = None
    later_prefills: float | None = None
    moves: float | None = None
    cold_prefill_tokens: float | None = None
    prefix_cache_share: float | None = None
    kv_shares: dict[str, float] = field(default_factory=dict)
    shared_found_tokens: float | None = None
    tier_energy_j: dict[str, float] = field(default_factory=dict)
    tier_tokens_per_j: dict[str, float] = field(default_factory=dict)


def read(text: str) -> dict[str, float] | None:
    """Read the counters in `NAMES` from a page of Prometheus' text format, summed over labels.

    Counters of tiers come besides, each under `of_tier`. None where the text has no counter.
    """
    found: dict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in NAMES:
                    found[sample.name] += sample.value
                elif sample.name in (_TIER_ENERGY, _TIER_TOKENS):
                    found[of_tier(sample.name, sample.labels["tier"])] += sample.value
    except ValueError:
        return None
    return dict(found) or None


def of_tier(name: str, tier: str) -> str:
    return f"{name}:{tier}"


def rise(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float] | None:
    """Return by how much each counter rose; None where a reading is missing, or a counter fell."""
    if before is None or after is None:
        return None
    risen = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return None if min(risen.values()) < 0 else risen


def server_figures(
    counters: Mapping[str, float] | None,
    conversations: int,
    kv_bytes_per_token: float | None = None,
) -> ServerFigures:
    """Work out what the counters' rise amounts to, of this many conversations that were started."""
    known = counters or {}
    count = {field: known.get(name) for field, name in _NAMES.items()}
    tokens, queries = count["handoff_tokens"], count["prefix_queries"]
    if tokens is not None:
        tokens += count["loaded_tokens"] or 0.0
    prefix = of_tier(_TIER_ENERGY, "")
    energy_j = {
        name.removeprefix(prefix): joules
        for name, joules in known.items()
        if name.startswith(prefix)
    }
    return ServerFigures(
        handoffs=count["handoffs"],
        handoff_tokens=tokens,
        handoff_tokens_per_conversation=(
            None if tokens is None or not conversations else tokens / conversations
        ),
        handoff_bytes=(
            None if tokens is None or kv_bytes_per_token is None else tokens * kv_bytes_per_token
        ),
        later_prefills=count["later_prefills"],
        moves=count["moves"],
        cold_prefill_tokens=count["cold_prefill_tokens"],
        prefix_cache_share=(count["prefix_hits"] or 0.0) / queries if queries else None,
        tier_energy_j=energy_j,
        tier_tokens_per_j={
            tier: known.get(of_tier(_TIER_TOKENS, tier), 0.0) / joules
            for tier, joules in energy_j.items()
            if joules
        },
    )
