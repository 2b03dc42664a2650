"""Serve's autoscaling policy follows the table, as long as it hears of it."""

import dataclasses
from typing import Any

import pytest
from ray.serve._private.common import TimeStampedValue
from ray.serve.config import AutoscalingConfig

from autoscale.serve import DECIDED_S, WANTED_REPLICAS, FollowTable, serve_options


@dataclasses.dataclass
class Context:
    raw_metrics: dict[str, dict[str, list[TimeStampedValue]]] | None
    target_num_replicas: int = 2


def test_serve_follows_the_latest_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoscale.serve.time.time", lambda: 100.0)
    word = TimeStampedValue
    wanted = {"a": [word(90.0, 1.0), word(98.0, 3.0)], "b": [word(99.5, 1.0)], "c": []}
    # "b" speaks last, and says what it heard before "a" did.
    decided = {"a": [word(90.0, 89.0), word(98.0, 97.5)], "b": [word(99.5, 96.5)], "c": []}
    follow = FollowTable()
    assert follow(Context({WANTED_REPLICAS: wanted, DECIDED_S: decided})) == (3, {})
    # "a" has left, and what it said stays the latest.
    for said in (wanted, decided):
        del said["a"]
    assert follow(Context({WANTED_REPLICAS: wanted, DECIDED_S: decided})) == (3, {})


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        {"other": {}},
        {WANTED_REPLICAS: {"a": [TimeStampedValue(99.0, 9.0)]}},
        # Said just now, of a decision long ago: the table is down, or does not reach it.
        {
            WANTED_REPLICAS: {"a": [TimeStampedValue(99.0, 9.0)]},
            DECIDED_S: {"a": [TimeStampedValue(99.0, 80.0)]},
        },
    ],
)
def test_without_a_fresh_word_serve_leaves_it_as_it_is(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoscale.serve.time.time", lambda: 100.0)
    assert FollowTable()(Context(said)) == (2, {})


def test_serve_accepts_the_options_and_finds_the_policy() -> None:
    config = AutoscalingConfig(**serve_options(1, 4))
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 1, 4)
    assert config.policy.get_policy() is FollowTable
