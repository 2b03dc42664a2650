"""Tiers that the settings name, and nodes that are of them."""

import dataclasses

from conserve.settings import load
from conserve_cli.doctor.verdict import check_tiers
from tests.unit.conserve_cli.doctor.sound import HEAD, SETTINGS, WORKER, bad


def test_a_tier_that_no_node_offers_is_named_with_those_there_are() -> None:
    settings = load({"decoders": {"tier": "h100"}, "prefillers": {"tier": "a40"}})
    good, wrong = sorted(check_tiers(settings, [HEAD, WORKER]), key=lambda one: one.level)
    assert (good.level, wrong.level) == ("ok", "wrong")
    assert good.seen == "prefillers: a40 (custom resource a40) on 10.0.0.2"
    assert "decoders: no node is of h100 (custom resource h100); there are: node 10" in wrong.seen
    assert "custom resources a40" in wrong.seen
    assert bad(check_tiers(SETTINGS, [HEAD, WORKER])) == []


def test_a_tier_by_accelerator_counts_where_there_are_gpus() -> None:
    settings = load(
        {"decoders": {"tier": "cheap"}, "tiers": {"cheap": {"accelerator_type": "A40"}}}
    )
    gpu = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A40": 1.0}
    node = dataclasses.replace(WORKER, resources=gpu)
    assert bad(check_tiers(settings, [HEAD, node])) == []
    other = dataclasses.replace(node, resources={**gpu, "accelerator_type:A40": 0.0})
    assert bad(check_tiers(settings, [HEAD, other])) == [("wrong", "tier")]
