"""A profile is of what is served, and placement takes its times."""

import json
from typing import Any

import pytest

from autoscale.capacity.profile import Encoding, load_profile
from autoscale.capacity.served import costs_of, engine_costs, with_profile
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


@pytest.mark.parametrize("name", ["a40-qwen3-0.6b", "h100-qwen3-8b", "cpu-embedded"])
def test_they_take_as_long_as_the_profile_says(name: str) -> None:
    profile = load_profile(name)
    costs = costs_of(profile)
    assert costs.prefill_s(900, 4_000) == pytest.approx(profile.prefill.marginal_s(900, 4_000))
    assert costs.handoff_s(900) == pytest.approx(profile.handoff.seconds(900))
    assert costs.handoff_s(0) == 0.0
    assert costs.prefill_share == profile.interference.prefill_share


def test_images_take_what_was_measured() -> None:
    profile = load_profile("cpu-embedded")
    assert costs_of(profile).encode_s(100) == 0
    sees = profile.model_copy(update={"encoding": Encoding(per_token_s=2e-3)})
    assert costs_of(sees).encode_s(100) == pytest.approx(0.2)


def test_settings_bring_their_profile_or_none() -> None:
    assert engine_costs(Settings()) is None
    settings = Settings(profile="a40-qwen3-0.6b")
    assert engine_costs(settings) == costs_of(load_profile("a40-qwen3-0.6b"))
