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


def planned(folder: Path, config: dict[str, Any]) -> Settings:
    (folder / "config.json").write_text(json.dumps(config))
    few = {"encoders": 1, "decoders": 1, "prefillers": 0, "lmcache.size_gb": 0.1}
    return planned_on_cpus(load({"model": str(folder), "engine.max_model_len": 128, **few}))[0]


def test_encoders_are_refused_for_a_model_that_reads_text_only(tmp_path: Path) -> None:
    assert planned(tmp_path, SEES).encoders.replicas == 1
    with pytest.raises(SettingsError, match="reads text only, so there is nothing to encode; set"):
        planned(tmp_path, {"architectures": ["LlamaForCausalLM"], **TEXT})
