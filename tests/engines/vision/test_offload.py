"""A tower of which a few layers stay encodes as one whose layers all stay."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.stage import Stage
from tests.engines.vision.model import DEEP, make_vision_model
from tests.engines.vision.offloaded import shown


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    make_vision_model(folder, DEEP)
    return folder


@pytest.fixture(scope="module")
def whole(stage: Stage, model: Path) -> dict[str, Any]:
    stage.clear()
    return shown(model)


# Two divide the six layers, and four do not.
@pytest.mark.parametrize("kept", [2, 4])
def test_answers_are_those_of_a_whole_tower(
    machine_alone: None, model: Path, whole: dict[str, Any], kept: int
) -> None:
    assert whole["physical_bytes"] == whole["tower_bytes"]
    found = shown(model, kept)
    assert found["tokens"] == whole["tokens"]
    # Whole weights take turns, and not biases alone.
    assert found["tower_bytes"] == whole["tower_bytes"]
    assert found["physical_bytes"] == whole["tower_bytes"] * kept // DEEP.layers
