"""Settings of policies that are out of their range are refused by their names."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from conserve_inside.policy import (
    ChunkController,
    DecodeShare,
    FeedbackQueue,
    PrefillLane,
    Retention,
    Stages,
)


@pytest.mark.parametrize(
    ("policy", "given", "said"),
    [
        (ChunkController, {"least_tokens": 10, "most_tokens": 9}, "least_tokens"),
        (FeedbackQueue, {"capacity_tokens": 9, "quota_tokens": 0.0}, "quota_tokens"),
        (PrefillLane, {"most_waiting": -1}, "most_waiting: -1"),
        (Retention, {"hold_s": 61.0}, "hold_s"),
        (
            partial(Stages, PrefillLane()),
            {"shares": {"encode": DecodeShare(24, 12, 4), "prefill": DecodeShare(12, 24, 4)}},
            "^prefill: .* is not possible",
        ),
    ],
)
def test_a_setting_out_of_range_is_named(
    policy: Callable[..., Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        policy(**given)
