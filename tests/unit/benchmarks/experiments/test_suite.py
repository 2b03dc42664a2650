"""The comparison of several systems: what is run, and what is made of it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.experiments import suite
from benchmarks.peers import Options, Peer, PeerUnavailable
from tests.unit.benchmarks.stub import Stub, served


def _run(out: Path, *more: str) -> Result:
    arguments = ["--out", str(out), "--conversations", "3", "--scale-tokens", "0.01"]
    arguments += ["--scale-gaps", "0", *more]
    return CliRunner().invoke(suite.cli, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Every system is this one; ``ray_pd`` cannot be started."""
    with served(Stub()) as stub:

        @contextmanager
        def start(name: str, options: Options, tell: Callable[[str], None]) -> Iterator[Peer]:
            tell(f"starting with {options.wrong_decision_rate:g}")
            if name == "ray_pd":
                raise PeerUnavailable("it needs a driver")
            takes_min_tokens = name == "conserve"
            described = {"engines": options.engines}
            yield Peer(name, stub.url, "stub-model", "X-Session", takes_min_tokens, described)

        monkeypatch.setattr(suite, "start", start)
        yield stub


def test_every_system_gets_the_same_conversations_at_each_rate(tmp_path: Path, stub: Stub) -> None:
    result = _run(
        tmp_path,
        *("--systems", "per_turn,ray_pd", "--wrong-decision-rates", "0.5", "--shares", "0.5,1"),
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "results.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    systems = ["system", "conserve", "per_turn-50"]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == 2 * systems
    assert "- ray_pd was not measured: it needs a driver" in text
    assert text in result.output
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("*-at-*/*.json")]
    assert len(reports) == 4
    assert len({json.dumps(report["workload"]) for report in reports}) == 1
    assert len({json.dumps(report["objectives"]) for report in reports}) == 1
    low, high = sorted({report["arrivals"]["rate_per_s"] for report in reports})
    assert high == pytest.approx(2 * low, rel=1e-3)
    assert (tmp_path / "per_turn-50.started.json").exists()
    assert list(tmp_path.glob("cdf-ttft*.png"))
    assert any("X-Session" in seen.headers for seen in stub.turns)
    # Only per_turn refuses it here.
    assert {"min_tokens" in seen.body for seen in stub.turns} == {True, False}


def test_without_conserve_there_is_nothing_to_be_relative_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def start(*_: object) -> Iterator[Peer]:
        raise PeerUnavailable("port 8000 is in use")
        yield

    monkeypatch.setattr(suite, "start", start)
    result = _run(tmp_path)
    assert result.exit_code == 1
    assert "conserve, which all is relative to: port 8000 is in use" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--systems", "conserve,dynamo"], "systems: no dynamo"),
        (["--shares", "a"], "shares: 'a' is not numbers"),
        (["--shares", "-1"], "shares: '-1' has a number below 0"),
        (["--wrong-decision-rates", "2"], "wrong_decision_rate: 2.0 is not from 0 to 1"),
        (["--data", "/nowhere"], "/nowhere: there is no such file or folder"),
        (["--cores", "0,0"], "cores: 1 different ones for 2 engines"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = _run(tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output
