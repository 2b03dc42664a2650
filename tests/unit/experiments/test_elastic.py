"""The comparison of placements, in small."""

import io
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from rich.console import Console

from autoscale.capacity.profile import load_profile
from benchmarks.records import TurnRequest
from experiments import elastic as command
from experiments.elastic import (
    SCENES,
    Cell,
    Figures,
    measure,
    over_best,
    session_s,
    show_against_best,
)
from experiments.harness import Experiment

_SMALL = replace(SCENES[0], conversations=6, engines=("1:1",), loads=(0.3,))


def figures(system: str, ttfet_p95_s: float | None, refused: int = 0) -> Figures:
    return Figures("s", "1:1", 0.5, 0, system, 20, refused, 1.0, ttfet_p95_s, 0.01, 0.0, 0)


def test_a_cell_has_each_systems_figures() -> None:
    found = list(measure(Cell(_SMALL, "1:1", 0.3, 0), ("collocated", "elastic"), None))
    assert [one.system for one in found] == ["collocated", "elastic"]
    for one in found:
        assert (one.conversations, one.refused) == (6, 0)
        assert one.ttfet_p50_s is not None
        assert one.ttfet_p95_s is not None
        assert 0 < one.ttfet_p50_s <= one.ttfet_p95_s


def test_who_refuses_more_than_a_twentieth_is_slower_than_any() -> None:
    others = [figures("conserve", None, 9), figures("collocated", 4.0), figures("affinity", 5.0)]
    assert over_best([figures("elastic", 3.0)], others) == pytest.approx(0.75)
    assert over_best([figures("elastic", None, 2)], others) == inf
    refusing = [figures("collocated", None, 5)]
    assert over_best([figures("elastic", None, 5)], refusing) == 1.0
    assert over_best([figures("elastic", None, 6)], refusing) == inf
    assert over_best([figures("elastic", 900.0)], refusing) == 0.0


def test_each_is_compared_with_what_has_the_same_beside_its_placement() -> None:
    others = [figures("collocated", 1.0), figures("collocated_parking", 2.0)]
    assert over_best([figures("elastic", 4.0)], others) == pytest.approx(4.0)
    assert over_best([figures("elastic_parking", 4.0)], others) == pytest.approx(2.0)


def test_the_best_of_the_others_is_one_system_over_all_seeds() -> None:
    def of_seeds(system: str, *ttfets_s: float | None) -> list[Figures]:
        return [replace(figures(system, s), seed=seed) for seed, s in enumerate(ttfets_s)]

    others = [*of_seeds("collocated", 2.0, 8.0), *of_seeds("affinity", 4.0, 5.0)]
    assert over_best(of_seeds("elastic", 4.0, 4.0), others) == pytest.approx(1.0)
    others += of_seeds("conserve", 1.0, None)
    assert over_best(of_seeds("elastic", 4.0, 4.0), others) == pytest.approx(1.0)


def test_scenes_of_other_loads_are_in_the_columns_of_theirs() -> None:
    found = [
        replace(figures(system, 2.0 * load), scene=scene, load=load)
        for scene, loads in (("short", (0.5, 1.0)), ("long", (1.0,)))
        for load in loads
        for system in ("collocated", "elastic")
    ]
    experiment = Experiment("elastic", None)
    experiment.console = console = Console(file=io.StringIO(), width=100)
    show_against_best(found, experiment)
    assert isinstance(console.file, io.StringIO)
    lines = {
        line.split()[1]: line for line in console.file.getvalue().splitlines() if "1:1" in line
    }
    assert lines["short"].count("1.00") == 2
    assert lines["long"].count("1.00") == 1
    assert lines["long"].rindex("1.00") == lines["short"].rindex("1.00")


def test_what_was_simulated_before_is_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SCENES", (_SMALL,))
    command.main(["--seeds", "0", "--out", str(tmp_path)])
    first = (tmp_path / "elastic.jsonl").read_text()
    assert len(first.splitlines()) == len(_SMALL.systems)
    printed = capsys.readouterr().out
    assert "over collocated" in printed
    assert (tmp_path / "elastic.png").stat().st_size > 0
    monkeypatch.setattr(command, "measure", None)
    command.main(["--seeds", "0", "--out", str(tmp_path)])
    assert (tmp_path / "elastic.jsonl").read_text() == first
    assert capsys.readouterr().out == printed


class _Idle:
    """Two turns of a conversation that is away in between."""

    conversation = "c"

    def __init__(self, gap_s: float) -> None:
        first = TurnRequest(0.0, "", dict, prompt_tokens=4_000, output_tokens=8)
        later = TurnRequest(gap_s, "", dict, 4_000, reused_tokens=3_999, output_tokens=8)
        self._turns = [first, later]

    def next(self, _: object) -> TurnRequest | None:
        return self._turns.pop(0) if self._turns else None


def test_what_saturates_engines_is_their_time_or_their_kv_space() -> None:
    profile = load_profile("a40-qwen3-0.6b").model_copy(update={"kv_capacity_tokens": 400_000})

    def nominal_s(gap_s: float, **how: bool) -> float:
        return session_s(profile, [(0.0, _Idle(gap_s)), (1.0, _Idle(gap_s))], **how)

    busy_s = nominal_s(0.0)
    assert 0 < busy_s < 1.0
    assert nominal_s(1.0) == busy_s
    # It holds a hundredth of the space for so long.
    assert nominal_s(1_000.0) == pytest.approx(10.0, rel=0.01)
    assert nominal_s(1_000.0, kv=False) == busy_s
