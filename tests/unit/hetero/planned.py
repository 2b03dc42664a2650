"""Nodes with H100s, plans for them, and models' folders, for tests of plans."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conserve.settings import Settings, load
from hetero.cards import Card
from hetero.container import HostMemory
from hetero.engine_needs import Needs
from hetero.gpu_layout import EnginePlan, with_counts
from hetero.gpu_plan import GpuNode, GpuPlan, gpus_of, plan
from hetero.model_shape import ModelShape, shape_of
from hetero.tiers import NodeOffer
from tests.unit.hetero.shapes import QWEN3_8B

MIB, GIB = 2**20, 2**30
QWEN3_BYTES = 16_381_470_720
QWEN3 = shape_of(QWEN3_8B, QWEN3_BYTES)


def node(
    cards: int = 1, gib: float = 80, free: float = 512, used: int = 0, limit: float | None = None
) -> GpuNode:
    """A node with these H100s, in GiB, of which others use some; `limit` is its container's."""
    card = Card("NVIDIA H100", int(gib * GIB), used * GIB)
    offer = NodeOffer("10.0.0.1", {"CPU": 8.0, "GPU": float(cards)}, {})
    memory = HostMemory(int((limit or free) * GIB), int(free * GIB), limited=limit is not None)
    return GpuNode(offer, (card,) * cards, memory.available_bytes, memory)


def planned(
    arguments: Mapping[str, Any], *nodes: GpuNode, shape: ModelShape | None = QWEN3, why: str = ""
) -> tuple[Settings, GpuPlan]:
    chosen = with_counts(load({"model": "m", **arguments}), gpus_of(nodes))
    return plan(chosen.on_nodes(len(nodes)), nodes, shape, why)


def made(
    arguments: Mapping[str, Any], *nodes: GpuNode, shape: ModelShape | None = QWEN3, why: str = ""
) -> GpuPlan:
    return planned(arguments, *nodes, shape=shape, why=why)[1]


def needs_of(engine: EnginePlan) -> Needs:
    assert engine.needs is not None
    return engine.needs


def written(
    folder: Path,
    config: Mapping[str, Any],
    weights_bytes: int | None = None,
    processor: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's folder: configurations, and an index of weights with their size."""
    folder.mkdir(exist_ok=True)
    index = {"metadata": {"total_size": weights_bytes}, "weight_map": {}}
    for name, content in (
        ("config.json", config),
        ("model.safetensors.index.json", index if weights_bytes is not None else None),
        ("preprocessor_config.json", processor),
    ):
        if content:
            (folder / name).write_text(json.dumps(content))
    return folder
