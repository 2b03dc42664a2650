"""The autoscaler that settings ask for."""

from typing import Any

import pytest

from autoscale.autoscaler import make_autoscaler
from conserve.settings import Settings


@pytest.mark.parametrize(
    ("tier", "slowdown"),
    [
        ({}, 1.0),
        ({"power_cap": 300}, 1.0),
        ({"power_cap": 200}, 1.14),
        ({"power_cap": "66.7%"}, 1.14),
        # Between two caps that are known, and below all of them: the slower.
        ({"power_cap": 250}, 1.14),
        ({"power_cap": 150}, 1.14),
    ],
)
def test_capped_prefillers_are_taken_for_slower(tier: dict[str, Any], slowdown: float) -> None:
    settings = Settings(
        model="Qwen/Qwen3-0.6B",
        profile="a40-qwen3-0.6b",
        placement="conversation",
        tiers={"fast": {"resource": "fast", **tier}},  # type: ignore[dict-item]
        prefillers={"max_replicas": 2, "tier": "fast"},  # type: ignore[arg-type]
    )
    load = make_autoscaler(settings)._load
    assert load is not None
    assert load._slowdown == pytest.approx(slowdown, abs=0.01)
