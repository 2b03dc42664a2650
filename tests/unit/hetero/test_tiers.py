"""Tiers: how roles are placed, and what is said where a cluster has no such node."""

from typing import Any

import pytest

from conserve.settings import Settings, SettingsError, load
from hetero.power import Cap
from hetero.tiers import NodeOffer, RoleTier, inventory, is_offered, missing, role_tier

PAPERS = {
    "tiers": {
        "fast": {"accelerator_type": "H100"},
        "frugal": {"accelerator_type": "A40", "power_cap": "66%"},
        "site": {"resource": "rack7", "labels": {"region": "north"}, "power_cap": 200},
    },
    "prefillers": {"tier": "fast"},
    "decoders": {"tier": "frugal"},
}
H100 = NodeOffer("10.0.0.1", {"CPU": 32, "GPU": 8, "accelerator_type:H100": 1}, {})
A40 = NodeOffer(
    "10.0.0.2",
    {"CPU": 16, "GPU": 2, "accelerator_type:A40": 1, "rack7": 1, "node:10.0.0.2": 1},
    {"region": "north", "ray.io/node-id": "x"},
)


def settings(**changes: Any) -> Settings:
    return load({**PAPERS, **changes})


def test_a_tier_is_what_ray_can_see() -> None:
    chosen = settings()
    fast = role_tier(chosen, chosen.prefillers, gpu=True)
    frugal = role_tier(chosen, chosen.decoders, gpu=True)
    assert fast == RoleTier("fast", {"accelerator_type:H100": 0.001})
    assert frugal == RoleTier("frugal", {"accelerator_type:A40": 0.001}, {}, Cap(fraction=0.66))
    chosen = settings(decoders={"tier": "site"})
    site = role_tier(chosen, chosen.decoders, gpu=True)
    assert site == RoleTier("site", {"rack7": 0.001}, {"region": "north"}, Cap(watts=200))
    assert (is_offered(site, A40), is_offered(site, H100)) == (True, False)
    elsewhere = NodeOffer(A40.name, A40.resources, {"region": "south"})
    assert not is_offered(site, elsewhere)


def test_a_tier_that_is_not_described_is_a_custom_resource() -> None:
    chosen = load({"decoders": {"tier": "rack7"}})
    assert role_tier(chosen, chosen.decoders, gpu=False) == RoleTier("rack7", {"rack7": 0.001})


def test_roles_that_name_none_run_anywhere() -> None:
    chosen = load({})
    assert role_tier(chosen, chosen.decoders, gpu=True) == RoleTier("gpu")
    assert role_tier(chosen, chosen.decoders, gpu=False) == RoleTier("cpu")
    assert missing(chosen, True, [H100]) == []


def test_without_gpus_everything_is_one_tier() -> None:
    """The same settings serve on a laptop; what marks nodes by hand still does."""
    chosen = settings()
    for own in (chosen.prefillers, chosen.decoders):
        assert role_tier(chosen, own, gpu=False) == RoleTier("cpu")
    chosen = settings(decoders={"tier": "site"})
    tier = role_tier(chosen, chosen.decoders, gpu=False)
    assert tier == RoleTier("site", {"rack7": 0.001}, {"region": "north"}, None)


def test_a_missing_tier_is_named_with_what_there_is() -> None:
    assert missing(settings(), True, [H100, A40]) == []
    (said,) = missing(settings(), True, [H100])
    assert said == (
        "decoders.tier: no node offers 'frugal' (accelerator type A40); start such a node, or set "
        "another decoders.tier"
    )
    both = missing(settings(decoders={"tier": "site"}), True, [])
    assert both == [
        "decoders.tier: no node offers 'site' (custom resource rack7, label region=north); start "
        "such a node, or set another decoders.tier",
        "prefillers.tier: no node offers 'fast' (accelerator type H100); start such a node, or set "
        "another prefillers.tier",
    ]
    # Prefillers that are not started need no node.
    alone = {"tiers": PAPERS["tiers"], "decoders": {"tier": "site"}, "placement": "collocated"}
    assert missing(load(alone), True, [A40]) == []
    assert inventory([H100, A40]).splitlines() == [
        "node 10.0.0.1: 32 CPU; 8 GPU; accelerator type H100",
        "node 10.0.0.2: 16 CPU; 2 GPU; accelerator type A40; custom resources rack7; "
        "labels region=north",
    ]
    assert inventory([]) == "no node"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tiers": {"x": {"power_cap": "150%"}}}, "such as 70%"),
        ({"tiers": {"x": {"power_cap": "0%"}}}, "tiers.x.power_cap"),
        ({"tiers": {"cpu": {}}}, "'cpu' is the name"),
        ({"tiers": {"a b": {}}}, "'a b' is no name"),
    ],
)
def test_bad_tiers_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(given)
