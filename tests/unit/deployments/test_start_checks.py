"""Files, folders and ports that a start needs are checked before anything runs."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from conserve.settings import SettingsError, load
from conserve_cli import gpu_plan
from conserve_cli.gpu_plan import busy_ports
from deployments.start_checks import require_startable
from tests.unit.hetero.shapes import QWEN3_8B


def refused(**settings: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        require_startable(load(settings))
    return list(caught.value.problems)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with everything in it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"metadata": {"total_size": 1}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in (*weights.values(), "tokenizer.json"):
        (folder / name).touch()
    return folder


def test_defaults_are_fine() -> None:
    require_startable(load({}))


def test_every_missing_file_is_a_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    # A file is where the folder would be.
    keys.touch()
    root = {"enabled": True, "root": str(keys / "environments")}
    lines = refused(keys_file=str(tmp_path / "none.json"), profile="none", environments=root)
    # The last one is an add-on's check.
    assert [line.split(":")[0] for line in lines] == ["keys_file", "profile", "environments.root"]
    assert "`conserve keys add TENANT --file" in lines[0]
    assert "those by name: " in lines[1]
    assert "set a folder in one that is the user's" in lines[2]
    (line,) = refused(keys_file=str(keys))
    assert line.startswith(f"keys_file: the key file {keys} is not usable")


def test_a_whole_model_is_taken(model: Path) -> None:
    require_startable(load({"model": str(model)}))


@pytest.mark.parametrize(
    ("absent", "arguments", "said"),
    [
        ("model-2.safetensors", {}, "1 of 2 files of weights (model-2.safetensors, ...)"),
        ("tokenizer.json", {}, "no tokenizer (tokenizer*, "),
        ("model*", {}, "no weights (*.safetensors, "),
        ("model*", {"engine.load_format": "dummy"}, None),
        ("tokenizer.json", {"engine.tokenizer": "acme/other"}, None),
        ("tokenizer.json", {"engine.skip_tokenizer_init": "true"}, None),
    ],
)
def test_a_model_that_lacks_files(
    model: Path, absent: str, arguments: dict[str, Any], said: str | None
) -> None:
    for file in model.glob(absent):
        file.unlink()
    given = {"model": str(model), **arguments}
    if said is None:
        require_startable(load(given))
        return
    (line,) = refused(**given)
    assert line.startswith(f"model: {model} lacks files: {said}")
    assert line.endswith("; download it anew")


def test_each_models_files_are_checked(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    models = {"a": {}, "b": {"model": str(model)}, "c": {"profile": "none"}}
    lines = refused(models=models)
    assert [line.split(": ")[0] for line in lines] == ["models.c.profile", "models.b.model"]


# --- Ports ----------------------------------------------------------------------------------------


def _free(count: int) -> int:
    """The first of some ports in a row on which nothing listens."""
    found = gpu_plan._free_from("127.0.0.1", 20_000 + os.getpid() % 5000, count, set())
    assert found is not None
    return found


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_port_that_is_taken_is_named_with_one_that_is_free(taken: int) -> None:
    port = _free(6)
    settings = load({"port": port, "lmcache.port": port + 1})
    with socket.create_server(("127.0.0.1", port + taken)):
        (line,) = busy_ports(settings)
    name = "port" if taken == 0 else "lmcache.port"
    assert line.startswith(f"{name}: {port + taken}, for ")
    said, _, other = line.rpartition(f"{name}=")
    assert said.endswith("is in use here; stop what listens there, or set ")
    assert list(busy_ports(load({"port": port, "lmcache.port": port + 1, name: int(other)}))) == []
