"""Profiles as placement takes them."""

import pytest

from autoscale.capacity.profile import Encoding, load_profile
from autoscale.capacity.served import costs_of, engine_costs
from conserve.settings import Settings


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
