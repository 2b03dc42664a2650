"""Plans that ask for what the model does not have."""

import json
from pathlib import Path
from typing import Any

import pytest

from conserve.settings import Settings, SettingsError, load
from deployments.gpu_plans import planned_on_cpus
from tests.unit.hetero.shapes import SMOLVLM_2B

# A model that fits any machine.
TEXT: dict[str, Any] = SMOLVLM_2B["text_config"] | {"num_hidden_layers": 1, "vocab_size": 1000}
SEES = {**SMOLVLM_2B, "text_config": TEXT}


READS = {"architectures": ["LlamaForCausalLM"], **TEXT}


def planned(folder: Path, config: dict[str, Any], **asked: Any) -> Settings:
    (folder / "config.json").write_text(json.dumps(config))
    few = {"decoders": 1, "prefillers": 0, "lmcache.size_gb": 0.1, "engine.max_model_len": 128}
    return planned_on_cpus(load({"model": str(folder), **few, **asked}))[0]


def test_encoders_are_refused_for_a_model_that_reads_text_only(tmp_path: Path) -> None:
    assert planned(tmp_path, SEES, encoders=1).encoders.replicas == 1
    with pytest.raises(SettingsError, match="reads text only, so there is nothing to encode; set"):
        planned(tmp_path, READS, encoders=1)


def test_layers_of_a_tower_are_refused_for_a_model_that_has_none(tmp_path: Path) -> None:
    asked = {"media.tower_layers": 2}
    assert planned(tmp_path, SEES, **asked).media.tower_layers == 2
    with pytest.raises(SettingsError, match=r"tower_layers: .* so it has no vision tower; unset"):
        planned(tmp_path, READS, **asked)
