"""Plans four models on cards of several sizes; `python -m tests.unit.hetero.plan_table` prints it.

Configurations and sizes of weights are as published. Cards are named, and nothing else of the
machine is looked at: a node has 64 GiB of free host memory for each card.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conserve.settings import SettingsError, load
from deployments.gpu_plans import plan_on
from hetero.cards import Card
from hetero.engine_needs import GIB, gib
from hetero.gpu_plan import GpuNode
from hetero.tiers import NodeOffer
from tests.unit.hetero.planned import written
from tests.unit.hetero.shapes import (
    GPT_OSS_20B,
    QWEN3_8B,
    QWEN3_NEXT_80B,
    QWEN25_VL_7B,
    QWEN25_VL_PROCESSOR,
)

# By name: configuration, bytes of the weights' files, and the processor's configuration.
MODELS: dict[str, tuple[Mapping[str, Any], int, Mapping[str, Any]]] = {
    "Qwen3-8B": (QWEN3_8B | {"model_type": "qwen3"}, 16_381_470_720, {}),
    "gpt-oss-20b": (GPT_OSS_20B, 13_761_264_768, {}),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT_80B, 162_656_845_824, {}),
    "Qwen2.5-VL-7B": (QWEN25_VL_7B, 16_584_333_312, QWEN25_VL_PROCESSOR),
}
# By what is printed: GPUs of a node, their name, and MiB as NVML has them.
MACHINES = {
    "1 x 24": (1, "NVIDIA GeForce RTX 4090", 24_564),
    "1 x 48": (1, "NVIDIA L40S", 46_068),
    "1 x 80": (1, "NVIDIA H100 80GB HBM3", 81_559),
    "1 x 141": (1, "NVIDIA H200", 143_771),
    "8 x 80": (8, "NVIDIA H100 80GB HBM3", 81_559),
}
# What a refusal says to set.
ADVICE = re.compile(r"(engine\.[a-z_.]+)=(\d+)")
COLUMNS = ("model", "GPUs, GiB", "set", "engines", "weights, KV (GiB of a GPU)", "tokens each",
           "tokens in host memory")  # fmt: skip


def table() -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for name, files in MODELS.items():
            path = written(Path(folder) / name, *files)
            for machine, (count, card, mebibytes) in MACHINES.items():
                cards = (Card(card, mebibytes * 2**20),) * count
                offer = NodeOffer("planned", {"CPU": 16.0 * count, "GPU": float(count)}, {})
                node = GpuNode(offer, cards, count * 64 * GIB)
                lines += _rows(name, path, machine, node)
    return "\n".join(lines) + "\n"


def _rows(name: str, path: Path, machine: str, node: GpuNode) -> list[str]:
    """Plan with the defaults, and while that is refused, with what the refusal says to set."""
    rows = []
    told: dict[str, int] = {}
    while True:
        said = ", ".join(f"`{setting}={value}`" for setting, value in told.items())
        start = f"| {name} | {machine} | {said} |"
        try:
            _, plan = plan_on(load({"model": str(path), **told}), [node], model_is_here=True)
        except SettingsError as error:
            refusal = error.problems[0]
            rows.append(f"{start} refused: {refusal.partition('; ')[2] or refusal} | | | |")
            advice = {setting: int(value) for setting, value in ADVICE.findall(refusal)}
            gpus = advice.get("engine.tensor_parallel_size", 1)
            if advice.keys() <= told.keys() or gpus > len(node.cards):
                return rows
            told |= advice
            continue
        engines = ", ".join(
            f"{one.replicas} {one.role}{'s' if one.replicas > 1 else ''}" for one in plan.engines
        )
        last = plan.engines[-1]
        assert last.needs is not None
        memory = f"{gib(last.needs.weights_bytes)}, {gib(last.kv_bytes or 0)}"
        tokens = f"{last.kv_tokens:,} | {plan.kept_tokens:,}"
        return [*rows, f"{start} {engines} | {memory} | {tokens} |"]


if __name__ == "__main__":
    sys.stdout.write(table())
