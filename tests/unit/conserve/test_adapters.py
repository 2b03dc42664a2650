"""What adapters there are, and what tells one from another."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conserve.adapters import (
    Adapter,
    AdapterError,
    AdapterFile,
    Adapters,
    adapter_in,
    digest_of,
    of_model,
    with_adapters,
)
from conserve.embedded import model_path
from conserve.settings import load
from conserve.tenants import keyfile
from tests.adapter_files import make_adapter

DIGEST = "0" * 63 + "a"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("made"), model_path(), 1)


def test_a_digest_is_of_the_files_contents_alone(made: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(made, tmp_path / "copy")
    (copy / "README.md").write_text("other")
    assert digest_of(copy) == digest_of(made)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(before[:-1] + b" ")
        assert digest_of(copy) != digest_of(made)
        (copy / name).write_bytes(before)
    (copy / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="safetensors cannot be read"):
        digest_of(copy)


def test_salts_and_numbers_are_of_the_name_the_digest_and_the_salt_before() -> None:
    one = Adapter("a", "/a", DIGEST)
    others = [Adapter("b", "/a", DIGEST), Adapter("a", "/a", DIGEST[::-1])]
    salts = [adapter.salt(salt) for adapter in (one, *others) for salt in (None, "", "acme")]
    assert len(set(salts)) == 9
    # LMCache takes at most 128 characters, and not all.
    assert all(len(salt) == 64 and salt.isalnum() for salt in salts)
    assert len({adapter.number for adapter in (one, *others)}) == 3
    assert one.salt("acme") == Adapter("a", "/elsewhere", DIGEST).salt("acme")


@pytest.mark.parametrize("path", ["/a", "/a@b@c", "/ä b"])
def test_engines_are_told_all_of_an_adapter_by_its_models_name(path: str) -> None:
    adapter = Adapter("team/sql:2", path, DIGEST)
    assert of_model(adapter.model) == adapter
    for model in ("Qwen/Qwen3-8B", "a@b@c", f"a@{DIGEST}", "/models/x@y"):
        assert of_model(model) is None


def test_engines_get_the_rank_that_adapters_need(made: Path, tmp_path: Path) -> None:
    def needed(*folders: Path, **given: Any) -> dict[str, Any]:
        adapters = {f"a{number}": str(folder) for number, folder in enumerate(folders)}
        return with_adapters(load({"adapters": adapters, **given})).engine

    assert needed(made)["max_lora_rank"] == 16
    large = make_adapter(tmp_path / "large", model_path(), 1, rank=40)
    found = needed(made, large)
    assert (found["enable_lora"], found["max_lora_rank"]) == (True, 64)
    assert needed(made, engine={"max_loras": 3})["max_loras"] == 3
    # A layer may have a rank of its own.
    config = json.loads((large / "adapter_config.json").read_text()) | {"rank_pattern": {"x": 65}}
    (large / "adapter_config.json").write_text(json.dumps(config))
    found = needed(made, *[large] * 6)
    assert (found["max_lora_rank"], found["max_loras"]) == (128, 7)


def test_a_files_adapters_come_and_go_and_those_of_settings_stay(
    made: Path, tmp_path: Path
) -> None:
    file = tmp_path / "adapters.json"
    adapters = Adapters(load({"adapters": {"a": str(made)}, "adapters_file": str(file)}), 0.0)
    own = adapter_in("a", str(made))
    assert adapters.all(0.0) == {"a": own}
    given = [Adapter(name, "/b", DIGEST) for name in ("a", "b", "conserve-embedded")]
    keyfile.write(file, AdapterFile(1, given))
    assert adapters.all(0.5) == {"a": own}
    # Theirs is not taken from them.
    known = {"a": own, "b": given[1], "conserve-embedded": given[2]}
    assert adapters.all(1.5) == known
    file.write_text("{")
    assert adapters.all(3.0) == known
    file.unlink()
    assert adapters.all(4.5) == {"a": own}


def test_a_file_that_is_not_usable_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    for text in ("{", '{"version": 2, "adapters": []}'):
        file.write_text(text)
        with pytest.raises(AdapterError, match="is not usable"):
            Adapters(load({"adapters_file": str(file)}), 0.0)
