"""Warm turns: how systems take turns under a load, and how they are compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import warm
from experiments.agents import Agent, Answer
from experiments.warm import Load, System


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """The agents whose warm turns were made, each turn a second long; two with the system b."""
    seen: list[Agent] = []

    async def prepare(self: Agent) -> None:
        return

    async def warm_turn(self: Agent) -> Answer:
        seen.append(self)
        took_s = 2.0 if self._url == "b" else 1.0
        return Answer({}, 0.0, took_s, [0.1, took_s])

    monkeypatch.setattr(Agent, "prepare", prepare)
    monkeypatch.setattr(Agent, "warm_turn", warm_turn)
    return seen


def test_systems_take_turns_under_each_load(made: list[Agent], tmp_path: Path) -> None:
    experiment = warm.experiment("warm", None)
    experiment.parse(
        ["--rounds", "3", "--clients", "1", "2", "--hogs", "0", "1", "--out", str(tmp_path)]
    )
    warm.compare(experiment, [System("A", "a"), System("B", "b")])
    # Four turns of each, one after the other, and two rounds to warm up before each load's three.
    taken = [agent._url for agent in made]
    rounds = [taken[n : n + 8] for n in range(0, len(taken), 8)]
    assert len(rounds) == 4 * 5
    assert all(sorted(one) == ["a"] * 4 + ["b"] * 4 for one in rounds)
    assert all(len(set(one[:4])) == 1 for one in rounds)
    found: dict[str, Any] = json.loads((tmp_path / "warm.json").read_text())
    assert list(found["ratios"]) == [
        "1 client", "2 clients", "1 client, 1 CPU hog", "2 clients, 1 CPU hog"
    ]  # fmt: skip
    assert found["ratios"][str(Load(2, 1))] == {"A": [1.0, 1.0, 1.0], "B": [2.0, 2.0, 2.0]}
    assert len(found["samples"]["1 client"]["B"]["latency_s"]) == 12
