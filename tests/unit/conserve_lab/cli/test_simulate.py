"""``conserve simulate`` as its user meets it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autoscale.capacity.profile import load_profile
from conserve_lab.cli import simulate as command
from conserve_lab.cli.simulate import cli
from conserve_lab.report import Report, read_report
from conserve_lab.simulate.run import EngineCounts, make_system, simulate_selection

PROFILE = "a40-qwen3-0.6b"


def _simulate(*arguments: str, columns: int = 200) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--profile", "h200"), "profile h200 cannot be read"),
        (("--system", "magic"), "the system is 'magic'"),
        (("--conversations", "0"), "0 conversations are asked for"),
        (("--workload", "dialogues"), "needs --data"),
        (("--rate", "-1"), "the arrival rate is -1"),
        (("--decoders", "0"), "give at least one decoder"),
        (("--prefillers", "0", "--system", "per_turn"), "per_turn sends later turns to prefillers"),
        (("--decoder-cap", "250"), "has no cap of 250 W"),
        (("--wrong-decision-rate", "2"), "--wrong-decision-rate is 2"),
        (("--system", "parking", "--host-tokens", "0"), "--host-tokens is 0"),
        (("--system", "pausing", "--host-tokens", "9"), "--host-tokens is parking's"),
        (("--max-context-tokens", "100"), "fits into 100 tokens"),
        (("--slo-multiple", "0"), "--slo-multiple is 0"),
        (("--block-tokens", "0"), "--block-tokens"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(
    arguments: tuple[str, ...], said: str
) -> None:
    status, output = _simulate(*arguments, columns=40)
    assert status == 2
    assert said in output
    assert len(output.strip().splitlines()) == 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the reports that were to be drawn: drawing takes seconds, and has its own tests."""
    found: list[str] = []

    def draw_all(reports: Sequence[Report], labels: Sequence[str], folder: Path) -> list[Path]:
        assert len(reports) == len(labels)
        assert folder.is_dir()
        found.extend(labels)
        return []

    monkeypatch.setattr("conserve_lab.plots.draw_all", draw_all)
    return found


def test_reports_are_those_of_bench(tmp_path: Path, drawn: list[str]) -> None:
    status, output = _simulate(
        "--conversations", "12", "--rate", "0.5", "--rate", "1.5",
        "--system", "collocated", "--out", str(tmp_path),
    )  # fmt: skip
    assert status == 0, output
    assert "TTFET less gaps" in output
    found = {path.stem: path for path in tmp_path.glob("*.json")}
    assert found.keys() == {"collocated-at-0.5-per-s", "collocated-at-1.5-per-s"}
    report = read_report(found["collocated-at-1.5-per-s"])
    assert report.options["profile"] == PROFILE
    assert report.result.conversations == {"completed": 12}
    assert len(report.samples["ttfet"]) == 12
    assert report.objectives is not None
    assert drawn == ["collocated at 0.5/s", "collocated at 1.5/s"]


@pytest.mark.parametrize(
    ("arguments", "most", "kept"),
    [
        ((), 10, False),
        (("--out", "{folder}"), 10, True),
        (("--rate", "1", "--rate", "2"), 10, True),
        (("--out", "{folder}"), 1, False),
        (("--system", "conserve", "--system", "collocated", "--out", "{folder}"), 1, False),
    ],
)
def test_latencies_are_kept_only_where_they_are_used_and_not_of_very_many(
    arguments: tuple[str, ...],
    most: int,
    kept: bool,
    tmp_path: Path,
    drawn: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Report] = []

    def simulated(*given: Any, **options: Any) -> list[Report]:
        reports = simulate_selection(*given, **options)
        found.extend(reports)
        return reports

    monkeypatch.setattr(command, "simulate_selection", simulated)
    monkeypatch.setattr(command, "_MOST_SAMPLED", most)
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    status, output = _simulate("--conversations", "2", "--preset", "react", *filled)
    assert status == 0, output
    assert all(bool(report.samples) == kept for report in found)
    assert ("not every latency is kept" in output) == (most == 1)
    if "--out" in arguments:
        written = [read_report(path) for path in tmp_path.glob("*.json") if "comp" not in path.stem]
        assert [bool(report.samples) for report in written] == [kept] * len(written)
        assert drawn
    assert not (tmp_path / "comparison.json").exists()


def test_systems_are_compared_with_the_first(tmp_path: Path, drawn: list[str]) -> None:
    status, output = _simulate(
        "--conversations", "2", "--rate", "1", "--preset", "react",
        "--system", "conserve", "--system", "per_turn", "--out", str(tmp_path),
    )  # fmt: skip
    assert status == 0, output
    assert "per_turn against conserve" in output
    (comparison,) = json.loads((tmp_path / "comparison.json").read_text())["comparisons"]
    assert (comparison["label"], comparison["baseline"]) == ("per_turn", "conserve")
    assert {ratio["kind"] for ratio in comparison["ratios"]} == {"paired"}


def test_collocated_has_as_many_engines_as_the_others() -> None:
    profile = load_profile(PROFILE)
    engines = EngineCounts(2, 5, decoder_cap_w=200.0)
    collocated = make_system("collocated", profile, engines)
    assert (len(collocated.prefillers), len(collocated.decoders)) == (0, 7)
    # The same caps, too: two engines of seven are not capped.
    slow = [costs.per_token_s > profile.prefill.per_token_s for costs in collocated.decoders]
    assert slow == [False, False, True, True, True, True, True]
    assert all(costs.batched_tokens == 2_944 for costs in collocated.decoders)
