"""Layers of a vision tower that take turns on a GPU: copies beside kernels, and what is freed."""

from pathlib import Path

import pytest

from tests.acceptance.gpu.card import printed_by
from tests.engines.streams import Put
from tests.engines.vision.model import REAL, make_vision_model
from tests.engines.vision.offloaded import shown

pytestmark = pytest.mark.step("offload")

# Of what is freed the allocator may keep a part.
_SURE = 0.9


def test_copies_beside_kernels(machine_alone: None, figure: Put) -> None:
    """Outputs are equal bit for bit, and memory is freed."""
    found = printed_by("-m", "tests.acceptance.gpu.on_offload")
    figure("a layer", found["layer_bytes"] / 1e6, "MB")
    for name, pass_ms in found["whole_ms"].items():
        figure(f"encoding {name}, all layers on the GPU", pass_ms, "ms")
    for row in found["rows"]:
        for name, pass_ms in row["pass_ms"].items():
            figure(f"encoding {name}, {row['kept']} layers on the GPU", pass_ms, "ms")
        figure(f"freed with {row['kept']} layers on the GPU", row["freed_bytes"] / 1e6, "MB")
        assert row["right"]
        assert row["freed_bytes"] > _SURE * row["said_bytes"]


def test_an_engine_gives_what_is_freed_to_kv(
    machine_alone: None, tmp_path: Path, figure: Put
) -> None:
    """It answers as an engine whose layers all stay; three divide its 27 layers, and two do not."""
    make_vision_model(tmp_path, REAL)
    whole = shown(tmp_path, gpu=True)
    for kept in (2, 3):
        found = shown(tmp_path, kept, gpu=True)
        freed, more = (
            whole["tower_bytes"] - found["physical_bytes"], found["kv_bytes"] - whole["kv_bytes"],
        )  # fmt: skip
        figure(f"freed where {kept} of 27 layers stay", freed / 1e6, "MB")
        figure(f"more KV where {kept} of 27 layers stay", more / 1e6, "MB")
        assert found["tokens"] == whole["tokens"]
        assert more > _SURE * freed
