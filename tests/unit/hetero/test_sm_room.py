"""SM slots that engines ask for, against the ten of a GPU."""

from typing import Any

import pytest

from conserve.settings import SettingsError, load
from hetero.cards import Card
from hetero.gpu_layout import with_memory
from hetero.gpu_plan import GpuNode, plan
from hetero.gpu_room import require_slots
from hetero.tiers import NodeOffer, RoleTier, role_tier
from tests.unit.hetero.planned import QWEN3


def two(prefill: int | None, decode: int | None, **changes: Any) -> dict[str, Any]:
    """A prefiller and a decoder on parts of a GPU, on so many slots."""
    return {
        "tiers": {"prefill": {"sm_slots": prefill}, "decode": {"sm_slots": decode}},
        "prefillers": {"tier": "prefill", "num_gpus": 0.35},
        "decoders": {"tier": "decode", "num_gpus": 0.65, "replicas": 1},
        **changes,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        two(3, 7),
        two(None, 10),
        two(3, None),
        # Engines with a GPU each have its ten slots each.
        two(7, 7, **{"prefillers.num_gpus": 1, "decoders.num_gpus": 1}),
        # Two of these have no room on one GPU.
        two(4, 6, **{"decoders.num_gpus": 0.51, "decoders.replicas": 4}),
        # Nobody else is there.
        {"placement": "collocated", "tiers": {"x": {"sm_slots": 5}}, "decoders": {
            "tier": "x", "num_gpus": 0.5, "replicas": 2}},
        # They are on different nodes: a node has one kind of GPUs.
        two(9, 9, tiers={"prefill": {"sm_slots": 9, "accelerator_type": "H100"},
                         "decode": {"sm_slots": 9, "accelerator_type": "A40"}}),
        two(9, 9, tiers={"prefill": {"sm_slots": 9, "labels": {"side": "left"}},
                         "decode": {"sm_slots": 9, "labels": {"side": "right"}}}),
    ],
)  # fmt: skip
def test_what_fits_whoever_shares_is_nothing_to_speak_of(arguments: dict[str, Any]) -> None:
    require_slots(load(arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            two(4, 7),
            r"tiers\.decode\.sm_slots: 1 prefiller x 4 \+ 1 decoder x 7 = 11 slots may be asked "
            r"of one GPU, which has 10; give fewer slots, or larger parts by num_gpus",
        ),
        # Ray may put all three decoders on one GPU, though there are enough for each.
        (
            two(1, 4, **{"decoders.num_gpus": 0.3, "decoders.replicas": 3}),
            r"3 decoders x 4 = 12",
        ),
        # One that comes later counts, too.
        (
            two(3, 7, **{"decoders.num_gpus": 0.3, "decoders.max_replicas": 2}),
            r"1 prefiller x 3 \+ 2 decoders x 7 = 17",
        ),
        # A custom resource may be on a node with another.
        (
            two(9, 9, tiers={"prefill": {"sm_slots": 9, "resource": "a"},
                             "decode": {"sm_slots": 9, "resource": "b"}}),
            "= 18 slots",
        ),
        (
            two(3, 7, **{"decoders.engine.tensor_parallel_size": 2, "decoders.num_gpus": 1}),
            r"decoders\.tier: 'decode' has sm_slots, which are for engines of one worker",
        ),
        (
            two(3, 7, **{"engine.worker_cls": "mine.Worker"}),
            r"prefillers\.engine\.worker_cls cannot be set: an engine with sm_slots",
        ),
        (
            two(None, 7, **{"decoders.engine.distributed_executor_backend": "mp"}),
            r"decoders\.engine\.distributed_executor_backend cannot be set",
        ),
    ],
)  # fmt: skip
def test_what_may_not_fit_is_refused_with_the_sum(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        require_slots(load(arguments))


def test_a_command_line_reaches_them() -> None:
    chosen = load({"tiers.x.sm_slots": "3", "decoders.tier": "x"})
    assert role_tier(chosen, chosen.decoders, gpu=True) == RoleTier("x", sm_slots=3)
    # As of a power cap, nothing comes of them on CPUs.
    assert role_tier(chosen, chosen.decoders, gpu=False) == RoleTier("cpu")


def test_the_plan_says_what_engines_get_of_both() -> None:
    """Slots beside the part of memory that ``num_gpus`` is."""
    settings = load(two(3, 7))
    card = Card("NVIDIA", 80 << 30)
    _, engines = with_memory(settings, QWEN3, {"prefillers": card, "decoders": card})
    assert [(one.role, one.num_gpus, one.sm_slots, one.fixed) for one in engines] == [
        ("prefiller", 0.35, 3, True),
        ("decoder", 0.65, 7, True),
    ]
    node = GpuNode(NodeOffer("n", {"CPU": 8, "GPU": 1}, {}), (), 64 << 30)
    told = two(3, 7, **{"engine.kv_cache_memory_bytes": 1 << 30})
    _, laid_out = plan(load(told), [node], None)
    assert "1 x decoder, 0.65 GPU a worker, 7 of ten SM slots" in laid_out.lines()[1]
    _, without = plan(load({"decoders": 1}), [node], None)
    assert "slots" not in "\n".join(without.lines())
