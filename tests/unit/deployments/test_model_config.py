"""Configurations as their classes read them, against the layers that those classes make."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from conserve.settings import load
from deployments.model_config import with_defaults
from deployments.model_files import model_shape
from hetero.model_shape import KvLayers, kv_of, shape_of
from tests.unit.hetero.planned import made, node, written
from tests.unit.hetero.shapes import GEMMA3_4B, JAMBA, NEMOTRON_H_8B, QWEN3_8B

# Each has all that it needs as its class says it by default, but for kinds of layers.
PLAIN = (
    "afmoe apertus cohere2 deepseek_v3 ernie4_5 exaone4 falcon_h1 gemma2 gemma3_text"
    " gemma3n_text gemma4_text glm4_moe glm_moe_dsa gpt_oss jamba kimi_linear llama llama4_text"
    " longcat_flash minimax minimax_m2 mistral mixtral nemotron_h olmo3 olmo_hybrid qwen2 qwen3"
    " qwen3_5_text qwen3_next recurrent_gemma seed_oss smollm3 zamba"
)
CLASSES: list[dict[str, Any]] = [
    *({"model_type": name} for name in PLAIN.split()),
    {"model_type": "bamba", "attn_layer_indices": [9, 18, 27]},
    {"model_type": "granitemoehybrid", "layer_types": (["mamba"] * 7 + ["attention"]) * 4},
    {"model_type": "lfm2", "layer_types": (["conv", "conv"] + ["full_attention"] * 2) * 8},
    JAMBA,
    NEMOTRON_H_8B,
    GEMMA3_4B["text_config"],
]


def _kept(config: dict[str, Any]) -> int:
    """Values of a token that a model projects to keys and values, or to what is both."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model = AutoModelForCausalLM.from_config(own)
    kept = 0
    for name, module in model.named_modules():
        above, _, last = name.rpartition(".")
        # Linear attention has keys as well, of which it keeps a state.
        if last == "k_proj" and not _keeps_a_state(type(model.get_submodule(above)).__name__):
            kept += 2 * module.out_features
        elif last == "kv_a_proj_with_mqa":
            kept += module.out_features
    return kept


def _keeps_a_state(name: str) -> bool:
    return any(word in name for word in ("Linear", "Delta", "Lightning", "Mamba"))


@pytest.mark.parametrize("config", CLASSES, ids=lambda config: str(config["model_type"]))
def test_kv_is_what_the_layers_of_a_class_keep(config: dict[str, Any]) -> None:
    expected = _kept(config)
    assert expected > 0
    shape = shape_of(with_defaults(config))
    # A sparse attention's indexer keeps its keys beside the values.
    assert shape.kv_token_bytes() - shape.index_token_bytes == 2 * expected


def test_gemma3_is_known_by_what_its_class_says(tmp_path: Path) -> None:
    """It was refused on one GPU, for the numbers that its config.json leaves out."""
    shape = model_shape(load({"model": str(written(tmp_path, GEMMA3_4B, 8_600_158_944))}))
    assert shape.kv_token_bytes() == 34 * 4 * 512 * 2
    assert (shape.vocabulary, shape.max_model_len) == (262_208, 131_072)
    assert (shape.weights_bytes, shape.estimated, shape.recurrent) == (8_600_158_944, False, False)
    assert [one.num_gpus for one in made({}, node(), shape=shape).engines] == [1]


# Small language models, with towers as their classes have them by default.
_TEXT = {"hidden_size": 3584, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
TOWERS: list[dict[str, Any]] = [
    *(
        {"model_type": kind, "text_config": _TEXT}
        for kind in ("idefics3", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5")
    ),
    *(
        {"model_type": kind, "text_config": _TEXT, "vision_config": vision}
        for kind, vision in (
            ("gemma3", {"model_type": "siglip_vision_model", "vision_use_head": False}),
            ("llava", {"model_type": "clip_vision_model"}),
            ("llava", {"model_type": "pixtral"}),
        )
    ),
]


def _in_tower(config: dict[str, Any]) -> int:
    """Parameters of a model's classes outside of its language model."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model = AutoModelForImageTextToText.from_config(own)
    text = ("language_model.", "text_model.", "lm_head.")
    return sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if not name.removeprefix("model.").startswith(text)
    )


@pytest.mark.parametrize(
    "config", TOWERS, ids=lambda config: "-".join((config["model_type"], *_tower_kind(config)))
)
def test_a_tower_is_as_large_as_its_classes_make_it(config: dict[str, Any]) -> None:
    shape = shape_of(with_defaults(config))
    assert shape.tower is not None
    # Norms and biases are left out.
    assert shape.tower.parameters == pytest.approx(_in_tower(config), rel=0.01)


def _tower_kind(config: dict[str, Any]) -> list[str]:
    return [config["vision_config"]["model_type"]] if "vision_config" in config else []


def test_what_is_written_counts() -> None:
    assert with_defaults({**QWEN3_8B, "model_type": "qwen3"})["num_hidden_layers"] == 36
    # Classes of some versions of transformers take one of these for the other.
    latent = {"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "head_dim": 192}
    assert shape_of(with_defaults(latent)).kv_token_bytes() == 61 * (512 + 64) * 2
    # "None" is to be worked out.
    config = {**QWEN3_8B, "model_type": "llama", "head_dim": None}
    assert shape_of(with_defaults(config)).kv_token_bytes() == 147_456


@pytest.mark.parametrize(
    "config",
    [
        QWEN3_8B,
        QWEN3_8B | {"model_type": "of-somebody"},
        QWEN3_8B | {"model_type": "qwen3", "layer_types": "none"},
    ],
)
def test_a_class_that_is_not_known_adds_nothing(config: dict[str, Any]) -> None:
    assert with_defaults(config) == config


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("gpt2", (12, 12, 128)), ("falcon", (32, 1, 128)), ("dbrx", (24, 1, 256))],
)
def test_names_of_a_class_are_those_that_are_read(kind: str, kept: tuple[int, int, int]) -> None:
    assert kv_of(with_defaults({"model_type": kind})) == (KvLayers(*kept),)
