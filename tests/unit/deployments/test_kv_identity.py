"""Which configurations share KV in LMCache, and which do not."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.settings import Settings
from deployments import kv_identity
from deployments.kv_identity import FILE_TIMES, KV_SETTINGS, cache_name, of_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    (tmp_path / "model.safetensors").write_bytes(bytes(2**21))
    (tmp_path / "README.md").write_text("a model")
    return tmp_path


def name(model: Path | str, settings: Settings | None = None, times: bool = True) -> str:
    # As in a new process.
    kv_identity._of_files.cache_clear()
    extra = {KV_SETTINGS: of_settings(settings or Settings(), gpu=False), FILE_TIMES: times}
    model_config = SimpleNamespace(model=str(model), revision=None)
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    config: Any = SimpleNamespace(model_config=model_config, kv_transfer_config=transfer)
    return cache_name("name", config)


@pytest.mark.parametrize(
    "given",
    [
        {"engine": {"dtype": "float16"}},
        {"engine": {"kv_cache_dtype": "fp8"}},
        {"engine": {"hf_overrides": {"rope_theta": 2}}},
        {"engine": {"quantization": "fp8"}},
        {"decoders": {"env": {"VLLM_KV_CACHE_LAYOUT": "HND"}}},
    ],
)
def test_what_changes_kv_changes_its_name(folder: Path, given: dict[str, Any]) -> None:
    assert name(folder, Settings(**given)) != name(folder)


def test_what_only_changes_room_does_not(folder: Path) -> None:
    settings = Settings(
        engine={"max_num_seqs": 7, "kv_cache_memory_bytes": 2**30},
        decoders={"replicas": 3},
        lmcache={"size_gb": 5.0},
    )
    assert name(folder, settings) == name(folder)


def test_weights_are_told_apart_by_their_files(folder: Path) -> None:
    before = name(folder)
    (folder / "README.md").write_text("the same model")
    assert name(folder) == before
    weights = folder / "model.safetensors"
    times = weights.stat().st_mtime_ns

    def changed(at: int) -> str:
        with weights.open("r+b") as file:
            file.seek(at)
            file.write(b"\1")
        os.utime(weights, ns=(times, times))
        return name(folder)

    # Of a large file some places are read; another time tells of what changes between them.
    assert changed(2**20) != before
    after = name(folder)
    assert changed(2**20 + 3 * 2**12) == after
    os.utime(weights)
    assert name(folder) != after
    # Copies on several nodes may have other times.
    several = name(folder, times=False)
    os.utime(weights, ns=(1, 1))
    assert name(folder, times=False) == several
    (folder / "config.json").write_text('{"rope_theta": 2}')
    assert name(folder, times=False) != several


def test_a_model_of_the_hub_is_told_apart_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(commit: str) -> None:
        path = f"/cache/snapshots/{commit}/config.json"
        monkeypatch.setattr(kv_identity, "try_to_load_from_cache", lambda *_, **__: path)

    cached("a" * 40)
    before = name("org/model")
    assert name("org/model") == before
    cached("b" * 40)
    assert name("org/model") != before


def test_a_model_elsewhere_has_its_name() -> None:
    assert name("s3://bucket/model") == name("s3://bucket/model") != name("s3://bucket/other")
