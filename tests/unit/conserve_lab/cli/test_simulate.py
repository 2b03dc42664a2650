"""``conserve simulate`` as its user meets it, and the paper's figures beside the simulation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autoscale.capacity.profile import ProfileError, load_profile
from conserve_lab.cli import simulate as command
from conserve_lab.cli.simulate import cli
from conserve_lab.records import TurnRecord
from conserve_lab.report import Report, read_report
from conserve_lab.simulate.costs import Costs
from conserve_lab.simulate.published import show, write
from conserve_lab.simulate.reproduce import (
    RUNS,
    SHAPE,
    Row,
    cold_prefill_s,
    reproduce,
    saturating,
)
from conserve_lab.simulate.run import EngineCounts, make_system, serve, simulate_selection
from conserve_lab.workloads import Arrivals, synthetic

PROFILE = "a40-qwen3-0.6b"


def _simulate(*arguments: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, arguments)
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
        (("--reproduce", "other"), "conserve"),
        (("--slo-multiple", "0"), "--slo-multiple is 0"),
        (("--block-tokens", "0"), "--block-tokens"),
        (("--reproduce", "conserve", "--rate", "2"), "--rate does not go with --reproduce"),
        (("--reproduce", "conserve", "--decoders", "3"), "--decoders does not go with"),
        (("--system", "per_turn", "--reproduce", "conserve"), "--system does not go with"),
        (("--reproduce", "conserve", "--workload", "synthetic"), "--workload does not go with"),
        (("--reproduce", "conserve", "--profile", "cpu-embedded"), "has no power"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(
    arguments: tuple[str, ...], said: str
) -> None:
    status, output = _simulate(*arguments)
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


def test_a_refusal_is_one_line_however_narrow_the_screen_is() -> None:
    done = CliRunner(env={"COLUMNS": "40"}).invoke(cli, ["--profile", "h200"])
    assert done.exit_code == 2
    assert len(done.output.strip().splitlines()) == 1


def test_a_profile_without_power_is_refused_before_anything_is_simulated() -> None:
    def ended(what: str) -> None:
        raise AssertionError(f"{what} was simulated")

    with pytest.raises(ProfileError, match="has no power"):
        reproduce(load_profile("cpu-embedded"), 1, on_conversation=ended)


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


def test_saturating_arrivals_keep_the_prefiller_busy_and_nobody_waiting() -> None:
    profile = load_profile(PROFILE)
    prefiller = Costs.of(profile, "prefiller")
    workload = synthetic(
        SHAPE, conversations=40, arrivals=Arrivals("even", 1.0), vocabulary=range(1_000, 4_000)
    )
    records: list[TurnRecord] = []
    system = make_system("conserve", profile, EngineCounts())
    cluster = serve(system, saturating(workload, prefiller), records.extend)
    first = sorted((r for r in records if r.turn == 1), key=lambda record: record.sent_s)
    took_s = [cold_prefill_s(record.prompt_tokens, prefiller) for record in first]
    assert [r.sent_s for r in first] == pytest.approx([sum(took_s[:i]) for i in range(40)])
    assert cluster.prefillers["prefiller-0"].busy_prefill_s == pytest.approx(sum(took_s))


def test_the_papers_figures(tmp_path: Path) -> None:
    """Few conversations: not the values, but that each is there, and what cannot be otherwise."""
    ended: list[str] = []
    found = reproduce(load_profile(PROFILE), 5, on_conversation=ended.append)
    assert len(ended) == 5 * RUNS
    rows = {row.what: row for row in found.rows}
    assert len(rows) == len(found.rows) == 31
    assert {row.figure for row in found.rows} == {"10", "12", "13"}
    # Without wrong decisions per-turn placement is ConServe's; fewer watts are more tokens/J.
    assert rows["TTFET gmean, no wrong decision over ConServe"].simulated == 1.0
    assert rows["tokens/J, ConServe, decoders at 200 W against 300 W"].simulated > 0.1
    assert rows["TTFET, E2E gmean, full disaggregation, any rate: least"].simulated > 1.0
    write(found, tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["simulated"] for row in written] == [row.simulated for row in found.rows]
    with (tmp_path / "table.txt").open("w") as file:
        show(found, load_profile(PROFILE), Console(file=file, width=200))
    assert "-51.1%" in (tmp_path / "table.txt").read_text()
    assert len(found.by_rate) == 24


def test_a_bound_is_kept_or_not_and_a_value_is_so_far_off() -> None:
    assert Row("10", "x", 2.0, 1.5, relation="<=").within is True
    assert Row("10", "x", 2.0, 2.0, relation=">").within is False
    assert Row("10", "x", 2.0, 2.0, relation=">=").within is True
    value = Row("10", "x", 2.0, 2.5)
    assert (value.within, value.difference) == (None, 0.5)
