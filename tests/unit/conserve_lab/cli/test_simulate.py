"""``conserve simulate`` as its user meets it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoscale.capacity.profile import load_profile
from conserve_lab.cli.simulate import cli
from conserve_lab.report import Report, read_report
from conserve_lab.simulate.run import EngineCounts, make_system

PROFILE = "a40-qwen3-0.6b"


def _simulate(*arguments: str, columns: int = 200) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--system", "magic"), "the system is 'magic'"),
        (("--prefillers", "0", "--system", "per_turn"), "per_turn sends later turns to prefillers"),
        (("--decoder-cap", "250"), "has no cap of 250 W"),
        (("--system", "pausing", "--host-tokens", "9"), "--host-tokens is parking's"),
        (("--models", "no.yaml"), "config: no.yaml cannot be read"),
        (("--models", "no.yaml", "--system", "elastic"), "--models goes with one --rate"),
        (("--models", "no.yaml", "--phase", "0"), "--phase and --start are seconds"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(
    arguments: tuple[str, ...], said: str
) -> None:
    status, output = _simulate(*arguments, columns=40)
    assert status == 2
    assert said in output
    assert len(output.strip().splitlines()) == 1


def test_several_models_are_simulated_without_and_with_shared_gpus(tmp_path: Path) -> None:
    scales = "model: Qwen/Qwen3-0.6B, decoders: {replicas: 1, max_replicas: 2}"
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  a: {{{scales}, profile: {PROFILE}}}\n  b: {{{scales}}}\n")
    given = ("--models", str(file), "--conversations", "40", "--phase", "15", "--gpus", "3")
    status, output = _simulate(*given)
    assert (status, "models.b.profile: engines are simulated by one" in output) == (2, True)
    file.write_text(file.read_text().replace("b: {", f"b: {{profile: {PROFILE}, "))
    status, output = _simulate(*given)
    assert status == 0
    rows = [
        line.split()[:2] for line in output.splitlines() if line.strip().startswith(("no", "yes"))
    ]
    assert rows == [["no", "a"], ["no", "b"], ["yes", "a"], ["yes", "b"]]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("prefillers: 2", "models.a.prefillers: there would be 2"),
        ("placement: collocated", "models.a.placement: several models are simulated under elastic"),
        ("decoders: {num_gpus: 0.5}, prefillers: 0", "an engine would have 0.5 GPUs"),
        ("engine: {tensor_parallel_size: 2}", "models.a.prefillers: there would be 1"),
    ],
)
def test_models_whose_engines_would_be_others_are_refused(
    own: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"profile: {PROFILE}\nmodels:\n  a: {{model: a, {own}}}\n  b: {{model: b}}\n")
    status, output = _simulate("--models", str(file), "--gpus", "8")
    assert (status, said in output) == (2, True), output


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
