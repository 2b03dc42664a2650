"""The harness: rounds, ratios, options, and what is saved."""

import json
from pathlib import Path

import pytest

from experiments.harness import Experiment, numbers, paired_ratio, percentile, rounds
from experiments.overhead import Load, WarmTurns


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    ratio, low, high = paired_ratio([1.5, 2.2, 4.4], [1.0, 2.0, 4.0])
    assert ratio == pytest.approx(1.1)
    assert (low, high) == pytest.approx((1.1, 1.5))


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile([7.0], 0.95) == 7.0


def test_each_round_has_everything_once_in_an_order_of_its_own() -> None:
    found = rounds("abc", 50, seed=1, warm_up=2)
    assert [number for number, _ in found] == [number for number in range(-2, 50) for _ in "abc"]
    orders = ["".join(name for _, name in found[n : n + 3]) for n in range(0, len(found), 3)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) == 6
    assert found == rounds("abc", 50, seed=1, warm_up=2)


def test_results_are_saved_where_the_options_say(tmp_path: Path) -> None:
    experiment = Experiment("table", "Says.", rounds=3, seed=1)
    experiment.parse([])
    experiment.save({"a": 1})
    assert experiment.file("png") is None
    assert not list(tmp_path.iterdir())
    experiment.parse(["--out", str(tmp_path / "new"), "--rounds", "2"])
    assert (experiment.options.rounds, experiment.options.seed) == (2, 1)
    experiment.save([WarmTurns([1.0]), {"at": Load(1)}])
    found = json.loads((tmp_path / "new" / "table.json").read_text())
    assert (found[0]["latency_s"], found[1]["at"]) == ([1.0], [1, 0])
    assert experiment.file("png") == tmp_path / "new" / "table.png"


def test_wrong_options_end_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    experiment = Experiment("table", "Says.", rounds=3)
    experiment.option("--loads", "1,2.5", type=numbers)
    assert experiment.parse([]).loads == (1.0, 2.5)
    for arguments, said in (
        (["--rounds", "0"], "give a whole number, at least 1"),
        (["--loads", "1,,2"], "give numbers from 0, with commas between"),
        (["--loads=-1"], "give numbers from 0"),
    ):
        with pytest.raises(SystemExit):
            experiment.parse(arguments)
        assert said in capsys.readouterr().err
