"""Layers of a vision tower that take turns on a GPU: copies beside kernels, and what is freed."""

import json
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.engines.gpu.card import NEEDS_GPU, seen
from tests.engines.vision.model import REAL, make_vision_model
from tests.engines.vision.offloaded import shown

pytestmark = NEEDS_GPU

# Of what is freed the allocator may keep a part.
_SURE = 0.9


def test_copies_beside_kernels(machine_alone: None) -> None:
    """Outputs are equal bit for bit, and memory is freed; the times are printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.gpu.on_offload"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    mb = found["layer_bytes"] / 1e6
    seen.info("layers of %.1f MB; all on the GPU: a pass takes %s ms", mb, found["whole_ms"])
    for row in found["rows"]:
        seen.info("%(kept)d layers: %(pass_ms)s ms, %(freed_bytes)d bytes freed", row)
        assert row["right"]
        assert row["freed_bytes"] > _SURE * row["said_bytes"]


def test_an_engine_gives_what_is_freed_to_kv(machine_alone: None, tmp_path: Path) -> None:
    """And answers as one whose layers all stay; three divide its 27 layers, and two do not."""
    make_vision_model(tmp_path, REAL)
    whole = shown(tmp_path, gpu=True)
    for kept in (2, 3):
        found = shown(tmp_path, kept, gpu=True)
        freed, more = (
            whole["tower_bytes"] - found["physical_bytes"], found["kv_bytes"] - whole["kv_bytes"],
        )  # fmt: skip
        seen.info("%d of 27 layers stay: %d bytes freed, %d more of KV", kept, freed, more)
        assert found["tokens"] == whole["tokens"]
        assert more > _SURE * freed
