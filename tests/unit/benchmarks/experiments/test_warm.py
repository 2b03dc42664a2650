"""Warm turns: how systems take turns under a load, and how they are compared."""

import argparse
import json
from pathlib import Path

import psutil
import pytest
from rich.progress import Progress

from benchmarks.experiments import warm
from benchmarks.experiments.warm import Load, WarmTurns, paired_ratio
from benchmarks.hogs import hogs


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    ratio, low, high = paired_ratio([1.5, 2.2, 4.4], [1.0, 2.0, 4.0])
    assert ratio == pytest.approx(1.1)
    assert (low, high) == pytest.approx((1.1, 1.5))


def test_a_round_counts_by_its_medians() -> None:
    turns = WarmTurns()
    turns.add(WarmTurns([1.0, 3.0, 2.0], [0.1, 0.3, 0.2], [0.01]))
    turns.add(WarmTurns([5.0], [0.5], [0.02, 0.03]))
    assert turns == WarmTurns(
        [1.0, 3.0, 2.0, 5.0], [0.1, 0.3, 0.2, 0.5], [0.01, 0.02, 0.03], [2.0, 5.0], [0.2, 0.5]
    )


def test_hogs_compute_while_a_block_runs_and_no_longer() -> None:
    before = set(psutil.Process().children())
    with hogs(2):
        started = set(psutil.Process().children()) - before
        assert len(started) == 2
    assert not any(process.is_running() for process in started)


def test_turns_are_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[int] = []

    async def turn(self: warm.ChatAgent, length: int, samples: WarmTurns | None) -> None:
        words.append(length)
        assert self._size.output_tokens == 8
        if samples is not None:
            samples.add(WarmTurns([1.0], [0.1], [0.01]))

    monkeypatch.setattr(warm.ChatAgent, "_turn", turn)
    parser = argparse.ArgumentParser()
    warm.add_options(parser)
    options = parser.parse_args(["--rounds", "1", "--first-words", "9000", "--output-tokens", "8"])
    size = warm.size(options)
    with Progress() as progress:
        warm.measure({"A": "a"}, 1, [Load(1)], progress, 0, size=size)
    assert words[0] == 9000
    assert set(words[1:]) == {30, 9000}
    assert warm.size(parser.parse_args([])) == warm.USUAL


def test_systems_take_turns_under_each_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[str] = []

    async def turn(self: warm.ChatAgent, words: int, samples: WarmTurns | None) -> None:
        if samples is not None:
            taken.append(self._url)
            samples.add(WarmTurns([2.0 if self._url == "b" else 1.0], [0.1], [0.01]))

    monkeypatch.setattr(warm.ChatAgent, "_turn", turn)
    parser = argparse.ArgumentParser()
    warm.add_options(parser)
    options = parser.parse_args(["--rounds", "3", "--clients", "1", "2", "--hogs", "0", "1"])
    loads = warm.loads(options)
    assert [str(load) for load in loads] == [
        "1 client", "2 clients", "1 client, 1 CPU hog", "2 clients, 1 CPU hog"
    ]  # fmt: skip
    with Progress() as progress:
        results = warm.measure({"A": "a", "B": "b"}, options.rounds, loads, progress, options.seed)
    assert list(results) == loads
    # Four turns of each, one after the other, and two rounds to warm up before each load's three.
    rounds = [taken[n : n + 8] for n in range(0, len(taken), 8)]
    assert len(rounds) == 4 * 5
    assert all(sorted(one) == ["a"] * 4 + ["b"] * 4 for one in rounds)
    assert all(len(set(one[:4])) == 1 for one in rounds)
    warm.write_json(tmp_path / "found.json", options, results, "A")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratios"][str(Load(2, 1))] == {"A": [1.0, 1.0, 1.0], "B": [2.0, 2.0, 2.0]}
