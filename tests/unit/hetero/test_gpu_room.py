"""GPUs that engines ask for, against those that there are."""

from typing import Any

import pytest

from conserve.settings import SettingsError, load
from hetero.gpu_layout import with_counts
from hetero.gpu_room import Crowd, most_on_node, require_shares, short_of_gpus
from hetero.tiers import NodeOffer


def node(gpus: float, name: str = "10.0.0.1", **resources: float) -> NodeOffer:
    return NodeOffer(name, {"CPU": 8.0, "GPU": gpus, **resources}, {})


@pytest.mark.parametrize(
    ("arguments", "nodes"),
    [
        ({}, [3]),
        ({"prefillers.num_gpus": 0.35, "decoders.num_gpus": 0.65, "decoders": 1}, [1]),
        ({"prefillers.num_gpus": 0.3333, "decoders.num_gpus": 0.3333, "decoders": 5}, [2]),
        # Decoders that may come later find their GPUs then.
        ({"decoders": {"replicas": 1, "max_replicas": 9}}, [2]),
        # Large ones first: else a small one would be in their way.
        (
            {"prefillers.num_gpus": 0.5, "decoders": 1, "decoders.engine.tensor_parallel_size": 2},
            [2, 1],
        ),
    ],
)
def test_enough_is_nothing_to_speak_of(arguments: dict[str, Any], nodes: list[float]) -> None:
    assert short_of_gpus(load(arguments), [node(gpus) for gpus in nodes]) == []


TWO_WORKERS = {"engine.tensor_parallel_size": 2, "decoders": 1}


@pytest.mark.parametrize(
    ("arguments", "nodes", "said"),
    [
        (
            {"decoders": 3},
            [1, 1],
            "1 prefiller x 1 + 3 decoders x 1 = 4 are asked for, and Ray has 2; ask for fewer "
            "engines, or have engines share them (gpus=2)",
        ),
        # Engines of several workers are refused if they share.
        (
            TWO_WORKERS,
            [2],
            "= 4 are asked for, and Ray has 2; ask for fewer engines, or fewer GPUs for each "
            "(engine.tensor_parallel_size)",
        ),
        # An engine is on one node.
        (
            {**TWO_WORKERS, "engine.tensor_parallel_size": 4, "placement": "collocated"},
            [2, 2],
            "1 decoder x 4 = 4 are asked for, and Ray has 4, which do not hold them",
        ),
        # A part is of one GPU.
        (
            {"prefillers.num_gpus": 0.6, "decoders.num_gpus": 0.6, "decoders": 2},
            [2],
            "= 1.8 are asked for, and Ray has 2, which do not hold them",
        ),
    ],
)
def test_the_sum_is_said_with_what_to_do(
    arguments: dict[str, Any], nodes: list[float], said: str
) -> None:
    (found,) = short_of_gpus(load(arguments), [node(gpus) for gpus in nodes])
    assert said in found
    assert ("gpus=" in found) == ("gpus=" in said)


def test_gpus_of_another_tier_do_not_count() -> None:
    tiers = {"fast": {"accelerator_type": "H100"}, "slow": {"accelerator_type": "A40"}}
    settings = load(
        {"tiers": tiers, "prefillers.tier": "fast", "decoders.tier": "slow", "decoders": 3}
    )
    nodes = [
        node(8, "a", **{"accelerator_type:H100": 1}),
        node(2, "b", **{"accelerator_type:A40": 1}),
    ]
    (said,) = short_of_gpus(settings, nodes)
    assert "1 prefiller x 1 + 3 decoders x 1 = 4" in said
    settings = load(
        {"tiers": tiers, "prefillers.tier": "fast", "decoders.tier": "slow", "decoders": 2}
    )
    assert short_of_gpus(settings, nodes) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"decoders.num_gpus": 0}, "decoders.num_gpus: 0: "),
        ({"prefillers.num_gpus": 2}, "prefillers.num_gpus: 2: .* set engine.tensor_parallel_size"),
        (
            {"decoders.num_gpus": 0.5, "decoders.engine.tensor_parallel_size": 2},
            "decoders.num_gpus: 0.5: the workers of an engine",
        ),
    ],
)
def test_parts_that_nobody_can_give_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        require_shares(load(arguments))


@pytest.mark.parametrize(
    ("arguments", "gpus", "here", "expected"),
    [
        # One engine a GPU, on the only node, and on one of four.
        ({}, 8, 2, Crowd(2, 2)),
        ({"gpus": 1, "decoders": 2}, 1, 1, Crowd(2, 2)),
        ({"engine.tensor_parallel_size": 4}, 8, 8, Crowd(2, 8)),
        # Those that may come later count, too.
        ({"decoders": {"replicas": 1, "max_replicas": 3}, "prefillers": 1}, 8, 8, Crowd(4, 4)),
    ],
)
def test_the_most_engines_on_a_node(
    arguments: dict[str, Any], gpus: int, here: int, expected: Crowd
) -> None:
    found = most_on_node(with_counts(load(arguments), gpus), here)
    assert found == expected
    assert found.waiting == expected.engines + expected.workers
    assert found.processes == 2 * expected.engines + expected.workers
