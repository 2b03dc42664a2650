"""Numbers that an engine cannot hand to its core."""

from typing import Any

import pytest

from conserve.budget import beyond_64_bits

MOST = 2**63 - 1


@pytest.mark.parametrize(
    "body",
    [
        {"seed": MOST + 1},
        {"seed": -MOST - 2},
        {"vllm_xargs": {"a": [1, {"b": 10**30}]}},
        {"max_tokens": 8, "stream_interval": 2**80},
    ],
)
def test_one_that_takes_more_than_64_bits_is_found(body: dict[str, Any]) -> None:
    assert beyond_64_bits(body) == list(body)[-1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"seed": MOST, "n": -MOST - 1, "temperature": 1e300, "stop": str(2**80)},
        {"messages": [{"role": "user", "content": [{"n": 2**80}]}]},
        {"tools": [{"function": {"parameters": {"maximum": 2**80}}}]},
    ],
)
def test_others_are_not(body: dict[str, Any]) -> None:
    """Numbers that become text may be of any size."""
    assert beyond_64_bits(body) is None
