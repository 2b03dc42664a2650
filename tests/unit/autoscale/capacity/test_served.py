"""A profile is of what is served."""

import json
from typing import Any

import pytest

from autoscale.capacity.profile import load_profile
from autoscale.capacity.served import with_profile
from conserve.settings import Settings, SettingsError


def scaled(**changes: Any) -> Settings:
    return Settings(
        prefillers={"max_replicas": 2},  # type: ignore[arg-type]
        **(
            {"model": "Qwen/Qwen3-0.6B", "placement": "conversation", "profile": "a40-qwen3-0.6b"}
            | changes
        ),
    )


def test_the_profile_has_to_be_of_the_served_model() -> None:
    assert with_profile(scaled()).profile == "a40-qwen3-0.6b"
    with pytest.raises(SettingsError, match=r"profile: .* of the model Qwen.*, but conserve-emb"):
        with_profile(scaled(model="embedded"))
    with pytest.raises(SettingsError, match="profile: profile nope cannot be read"):
        with_profile(scaled(profile="nope"))


def test_the_profile_has_to_be_of_the_version_that_runs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(load_profile("a40-qwen3-0.6b").model_dump_json())
    data["versions"] = {"vllm": "0.1.0"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text(json.dumps(data))
    with pytest.raises(SettingsError, match=r"made with vllm 0\.1\.0, but .* runs"):
        with_profile(scaled(profile="old.json"))
    data["versions"] = {}
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert with_profile(scaled(profile="old.json")).profile == str(tmp_path / "old.json")
