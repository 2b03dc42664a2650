"""Works out what an engine of a model needs of each GPU: weights, a reserve and KV. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from conserve.settings import SettingsError
from conserve.wire import Role
from hetero.cards import Card
from hetero.model_shape import ModelShape
from hetero.vision_tower import TowerNeeds, tower_needs

GIB = 2**30
# CUDA's context and libraries, NCCL, and attention workspaces of each engine.
CONTEXT_BYTES = 1 * GIB
# Captured CUDA graphs; none with `enforce_eager`.
_GRAPHS_BYTES = 1 * GIB
# Graphs captured for every position of the border between decoding and the prefill lane, together.
GRAPH_SETS_BYTES = 1 * GIB
# The sampler keeps logits, probabilities and their sorted copy, 32 bits each.
_SAMPLING_BYTES = 3 * 4
# vLLM's default `max_num_seqs` on a GPU of at least 70 GiB that is no A100, and on others.
_LARGE_BYTES, _LARGE_SEQS, _SEQS = 70 * GIB, 1024, 256
# Share of the estimated reserve that vLLM is sure to find taken when it measures.
_SURE_RESERVE = 0.5


@dataclass(frozen=True, slots=True)
class Needs:
    """GPU memory that each worker of an engine needs."""

    weights_bytes: int
    # Contexts, graphs and a step of the largest batch, or encoding of one; an estimate.
    reserve_bytes: int
    kv_token_bytes: float
    least_tokens: int  # The longest sequence, for which vLLM wants room.
    kv_copies: int = 1  # Workers that keep the same KV; one of them stores it for others.
    at_most: bool = False  # Whether that sequence may take less KV than its tokens count for.
    tower: TowerNeeds | None = None  # Counted in the weights and the reserve, but for its cache.
    beside_bytes: int = 0  # More than the reserve, where encoding and a step overlap.

    @property
    def cache_bytes(self) -> int:
        """Bytes of vLLM's encoder cache."""
        return 0 if self.tower is None else self.tower.cache_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory with the tower's layers; 0: all are on the GPU."""
        return 0 if self.tower is None else self.tower.host_bytes

    @property
    def video_bytes(self) -> int:
        """Bytes that encoding the largest video takes, with its embeddings; 0: it is no video."""
        if self.tower is None or not self.tower.has_video:
            return 0
        return self.tower.encode_bytes + self.tower.cache_bytes

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.reserve_bytes + self.cache_bytes

    @property
    def sure_bytes(self) -> int:
        """The part of `fixed_bytes` that is taken in any case: the reserve is an estimate."""
        return self.weights_bytes + int(_SURE_RESERVE * (self.reserve_bytes + self.cache_bytes))

    @property
    def least_kv_bytes(self) -> int:
        return math.ceil(self.least_tokens * self.kv_token_bytes)


def role_needs(
    role: Role, shape: ModelShape, arguments: Mapping[str, Any], card: Card | None
) -> Needs:
    """Return what each worker of a role's engine needs.

    An encoder whose tower is not known counts as the whole model, without KV.
    """
    if role != "encoder":
        return needs(shape, arguments, card)
    return encoder_needs(shape, arguments) or replace(
        needs(shape, arguments, card), kv_token_bytes=0.0, least_tokens=0
    )


def needs(shape: ModelShape, arguments: Mapping[str, Any], card: Card | None) -> Needs:
    tensor = int(arguments.get("tensor_parallel_size", 1))
    pipeline = int(arguments.get("pipeline_parallel_size", 1))
    large = (
        card is not None and card.memory_bytes >= _LARGE_BYTES and "a100" not in card.name.lower()
    )
    seqs = int(arguments.get("max_num_seqs") or (_LARGE_SEQS if large else _SEQS))
    batched = int(arguments["max_num_batched_tokens"])
    graphs = 0 if arguments.get("enforce_eager") else _GRAPHS_BYTES
    step = batched * shape.step_width * shape.value_bytes // tensor
    sampling = seqs * shape.vocabulary * _SAMPLING_BYTES
    longest = arguments.get("max_model_len", shape.max_model_len)
    if not isinstance(longest, int) or longest < 0:
        longest = 0  # vLLM's "auto": as long as there is room for.
    kept_as = str(arguments.get("kv_cache_dtype", "auto"))
    # The part of the weights that vLLM keeps in host memory.
    offloaded = int(float(arguments.get("cpu_offload_gb") or 0) * GIB)
    weights = (shape.weights_bytes - shape.tower_bytes) // (tensor * pipeline)
    tower = tower_needs(shape.tower, shape.value_bytes, arguments, longest) if shape.tower else None
    encode = 0
    if tower is not None:
        # Each stage has the tower.
        weights, encode = weights + tower.weights_bytes, tower.encode_bytes
    slots = adapter_bytes(shape, arguments) // pipeline
    return Needs(
        weights_bytes=max(0, weights - offloaded) + slots,
        # An engine without a lane encodes between its steps.
        reserve_bytes=CONTEXT_BYTES + graphs + max(step + sampling, encode),
        beside_bytes=min(step + sampling, encode),
        kv_token_bytes=shape.kv_token_bytes(tensor, kept_as) / pipeline,
        least_tokens=longest,
        kv_copies=tensor if shape.shares_kv else 1,
        at_most=shape.windowed or shape.recurrent,
        tower=tower,
    )


def adapter_bytes(shape: ModelShape, arguments: Mapping[str, Any]) -> int:
    """Return the bytes of an engine's slots for adapters (LoRA), by an estimate from above.

    A slot has both halves, of the largest rank, of an adapter of each layer, whose sizes are mostly
    the hidden size and more.
    """
    if not arguments.get("enable_lora"):
        return 0
    # A quantised model has 4 bits for a weight at least; an adapter is never quantised.
    weight_bytes = 0.5 if shape.quantised else shape.value_bytes
    widths = 2 * shape.weights_bytes / weight_bytes / shape.hidden
    rank = int(arguments.get("max_lora_rank") or 16)
    return int(widths * rank * int(arguments.get("max_loras") or 1) * shape.value_bytes)


def encoder_needs(shape: ModelShape, arguments: Mapping[str, Any]) -> Needs | None:
    """Return what each worker of an engine that only encodes needs (vLLM's ``mm_encoder_only``).

    It has no language model, no KV and no graphs. None if the model has no tower that is known, or
    the engine takes text only.
    """
    if shape.tower is None:
        return None
    longest = arguments.get("max_model_len", shape.max_model_len)
    known = isinstance(longest, int) and longest > 0
    tower = tower_needs(shape.tower, shape.value_bytes, arguments, longest if known else 0)
    if tower is None:
        return None
    reserve = CONTEXT_BYTES + tower.encode_bytes
    return Needs(tower.weights_bytes, reserve, kv_token_bytes=0.0, least_tokens=0, tower=tower)


def require_longest(what: str, kv_bytes: int, needs: Needs) -> None:
    """Raise `SettingsError` if KV space does not hold the longest sequence, as vLLM does."""
    if kv_bytes >= needs.least_kv_bytes:
        return
    tokens = max(0, int(kv_bytes / needs.kv_token_bytes) // 16 * 16)
    shorter = f"set engine.max_model_len={tokens}, or more KV space" if tokens else "give it more"
    raise SettingsError(
        f"{what}: {gib(kv_bytes)} GiB hold {tokens:,} tokens, and vLLM does not start with less "
        f"than the longest sequence's {needs.least_tokens:,}, which take "
        f"{gib(needs.least_kv_bytes)} GiB; {shorter}"
    )


def gib(count: float) -> str:
    return f"{count / GIB:.1f}"
