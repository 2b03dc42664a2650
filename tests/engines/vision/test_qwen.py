"""A Qwen-VL's tokens are the same with a lane as without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.clients.clients import INSTALLED
from tests.checkout import ROOT

_TORCHVISION = INSTALLED / "torchvision"
_LONGEST_S = 600.0


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_random_turns_have_the_same_tokens_with_the_lane_and_without(
    machine_alone: None, tmp_path: Path, model: str
) -> None:
    """The first one's prompts are prefilled in the lane. Those of the other one, which shows images
    to several of its layers, are prefilled in steps."""
    if not (_TORCHVISION / ".installed").exists():
        pytest.skip("vLLM imports torchvision for this model: `make test-vision` fetches it")
    path = os.pathsep.join([str(_TORCHVISION), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "tests.engines.vision.qwen", model, tmp_path],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=_LONGEST_S,
    )
