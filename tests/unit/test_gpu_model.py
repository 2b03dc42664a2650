"""The model that tests on a GPU serve: a real one's shape, on which nothing is left to chance."""

import json
from pathlib import Path

from conserve.embedded import model_path
from tests.engines.gpu.model import LAYERS, make_real_shape


def test_its_kv_is_a_real_models_and_it_is_always_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        make_real_shape(folder, layers=1)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    config = json.loads((folders[0] / "config.json").read_text())
    # Keys and values, two bytes each.
    kv_bytes = 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * LAYERS
    assert kv_bytes == 112 * 1024
    assert config["dtype"] == "bfloat16"
    template = (folders[0] / "chat_template.jinja").read_text()
    assert template == (model_path() / "chat_template.jinja").read_text()
