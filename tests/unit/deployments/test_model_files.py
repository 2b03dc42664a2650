"""Where a model's configuration and the size of its weights are found."""

import json
from pathlib import Path
from typing import Any

import pytest

from conserve.embedded import model_path
from conserve.settings import SettingsError, load
from deployments.model_files import model_shape, require_adapters
from hetero.model_shape import ModelUnknown
from tests.adapter_files import make_adapter
from tests.unit.hetero.planned import written
from tests.unit.hetero.shapes import QWEN3_8B, QWEN25_VL_7B


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path, QWEN3_8B)


def test_weights_are_those_of_the_files(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(3000))
    (folder / "model-00002-of-00002.safetensors").write_bytes(bytes(1000))
    (folder / "consolidated.safetensors").write_bytes(bytes(4000))
    shape = model_shape(load({"model": str(folder)}))
    assert (shape.weights_bytes, shape.estimated) == (4000, False)


def test_an_index_says_it_without_them(folder: Path) -> None:
    written(folder, QWEN3_8B, 16_381_470_720)
    assert model_shape(load({"model": str(folder)})).weights_bytes == 16_381_470_720


def test_how_large_an_image_may_be_is_in_the_processors_files(folder: Path) -> None:
    def image(**arguments: Any) -> int:
        shape = model_shape(load({"model": str(folder), **arguments}))
        assert shape.tower is not None
        return shape.tower.image

    written(folder, QWEN25_VL_7B)
    assert image() == 16_384
    written(folder, QWEN25_VL_7B, processor={"min_pixels": 3136, "max_pixels": 1280 * 784})
    assert image() == 1280
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": {"max_pixels": 2560 * 784}})
    )
    assert image() == 2560
    assert image(**{"engine.mm_processor_kwargs.max_pixels": 640 * 784}) == 640


def test_the_cache_of_the_hub_is_looked_into(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--acme--agent" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_8B))
    (snapshot / "model.safetensors").write_bytes(bytes(500))
    refs = hub / "models--acme--agent" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(hub), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    assert model_shape(load({"model": "acme/agent"})).weights_bytes == 500


@pytest.mark.parametrize(
    "model",
    [
        *("acme/none", "s3://bucket/model", "/no/such/folder", "./none", "~/none", "a b", "-"),
        *("a//b", "acme/", "é/x", "x" * 200, "a\nb", "../..none"),
    ],
)
def test_what_is_not_to_be_had_is_said(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The hub is not asked, as with HF_HUB_OFFLINE.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnknown) as caught:
        model_shape(load({"model": model}))
    assert f"config.json of {model!r} cannot be read" in str(caught.value)
    assert "download the model, and give its folder or its id" in str(caught.value)


def test_an_adapter_of_another_model_is_refused_in_a_line(tmp_path: Path) -> None:
    """By its base's name where that tells, else by the sizes of its layers."""
    folder, small = tmp_path / "sql", written(tmp_path / "small", QWEN3_8B)

    def problem(model: str = "embedded") -> str:
        try:
            require_adapters(load({"model": model, "adapters": {"sql": str(folder)}}))
        except SettingsError as error:
            return "; ".join(error.problems)
        return ""

    assert "sql/adapter_config.json cannot be read" in problem()
    make_adapter(folder, model_path(), 1)
    assert problem() == ""
    make_adapter(folder, small, 1)
    assert problem() == f"adapters: sql is of another model ({small}) than embedded"
    make_adapter(folder, model_path(), 1, base="Qwen/Qwen3-8B")
    assert problem("Qwen/Qwen3-8B") == problem("Qwen/Qwen3-8B-FP8") == problem() == ""
    assert "of another model (Qwen/Qwen3-8B)" in problem("Qwen/Qwen3-4B")
    (folder / "adapter_model.safetensors").unlink()
    assert "sql has no weights" in problem()
