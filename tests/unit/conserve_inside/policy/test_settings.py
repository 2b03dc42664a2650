"""Settings of policies that are out of their range are refused by their names."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from conserve_inside.policy import (
    ChunkController,
    DecodeReserve,
    DecodeShare,
    FeedbackQueue,
    PrefillLane,
    Retention,
    Stages,
)

CHUNKS, LEVELS, RESERVE = ChunkController, partial(FeedbackQueue, 64_000), DecodeReserve
STAGES = partial(Stages, PrefillLane())
FITS = DecodeShare(24, 12, 4)


@pytest.mark.parametrize(
    ("policy", "given", "said"),
    [
        (CHUNKS, {"least_tokens": 0, "most_tokens": 9}, "least_tokens"),
        (CHUNKS, {"least_tokens": 10, "most_tokens": 9}, "least_tokens"),
        (CHUNKS, {"least_tokens": 1, "most_tokens": 9, "late_s": 0.0}, "late_s"),
        (CHUNKS, {"least_tokens": 1, "most_tokens": 9, "calm_share": 1.0}, "calm_share"),
        (LEVELS, {"levels": 0}, "levels"),
        (LEVELS, {"quota_tokens": 0.0}, "quota_tokens"),
        (LEVELS, {"window_s": -1.0}, "window_s"),
        (LEVELS, {"age_s": 0.0}, "age_s"),
        (PrefillLane, {"most_waiting": -1}, "most_waiting: -1"),
        (PrefillLane, {"longest_wait_s": -1.0}, "longest_wait_s: -1"),
        (RESERVE, {"sizes_sms": (32, 16)}, "sizes_sms"),
        (RESERVE, {"sizes_sms": (0, 16)}, "sizes_sms"),
        (RESERVE, {"sizes_sms": (16,), "late_s": 0.0}, "late_s"),
        (RESERVE, {"sizes_sms": (16,), "calm_share": 1.0}, "calm_share"),
        (RESERVE, {"sizes_sms": (16,), "most_share": 1.0}, "most_share"),
        (Retention, {"hold_s": -1.0}, "hold_s"),
        (Retention, {"hold_s": 61.0}, "hold_s"),
        (Retention, {"factor": 0.0}, "factor"),
        (Retention, {"weight": 0.0}, "weight"),
        *(
            (
                STAGES,
                {"shares": {"encode": FITS, "prefill": DecodeShare(*share)}},
                "^prefill: .* is not possible",
            )
            for share in ((12, 24, 4), (12, 0, 4), (12, -1, 4), (24, 12, -1))
        ),
    ],
)
def test_a_setting_out_of_range_is_named(
    policy: Callable[..., Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        policy(**given)
