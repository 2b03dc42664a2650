"""What is printed into a pipe is whole: no table is cut or folded to the width of a terminal."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conserve_cli.output import new_console
from tests.checkout import ROOT
from tests.unit.conserve_lab.stub import Stub, served

PROFILE = "a40-qwen3-0.6b"
_LONG = "a-system-whose-name-is-as-long-as-this-one-is"


def _piped(module: str, *arguments: str | Path) -> list[str]:
    """The lines that a program writes into a pipe."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "…" not in done.stdout
    return done.stdout.splitlines()


def test_bench_run_and_compare(tmp_path: Path) -> None:
    with served(Stub()) as one, served(Stub()) as two:
        lines = _piped(
            "conserve_cli.main", "bench", "run", f"{_LONG}={one.url}", f"{_LONG}-too={two.url}",
            "--scale-tokens", "0.01", "--scale-gaps", "0", "--arrivals", "together",
            "--conversations", "2", "--rounds", "2", "--unloaded", "1", "--no-plots",
            "--out", tmp_path,
        )  # fmt: skip
    for shown in (
        lines,
        _piped(
            "conserve_cli.main",
            *("bench", "compare", tmp_path / f"{_LONG}.json", tmp_path / f"{_LONG}-too.json"),
        ),
    ):
        # Of latencies, of work done, and of ratios.
        heads = [line.split() for line in shown if line.split()[:2] == [_LONG, f"{_LONG}-too"]]
        assert [head[2:] for head in heads] == [[], [], ["ratio", "95", "%", "rounds"]]
        (said,) = [line for line in shown if line.startswith("Alternated")]
        assert _LONG in said


def test_plan() -> None:
    lines = _piped("conserve_cli.main", "plan", "--profile", PROFILE, "--conversations", "5")
    (head,) = [line for line in lines if "decoders on" in line]
    assert len(head) > 80
    assert head.split()[-4:] == ["full", "batch", "W", "J/conv."]


def test_simulate() -> None:
    systems = ["conserve", "collocated", "full_disaggregation", "per_turn", "affinity"]
    options = [part for system in systems for part in ("--system", system)]
    lines = _piped(
        *("conserve_cli.main", "simulate", "--profile", PROFILE, "--conversations", "2"), *options
    )
    heads = [line for line in lines if line.split() == systems]
    assert len(heads) == 2
    assert all(len(head) > 80 for head in heads)


def test_experiments() -> None:
    lines = _piped("experiments.energy", "--conversations", "2")
    (head,) = [line for line in lines if "heterogeneous: " in line]
    assert len(head) > 80


def test_peers() -> None:
    lines = _piped("conserve_lab.peers", "list")
    assert any("Settings: ConServe's own application with" in line for line in lines)


def test_a_terminal_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert new_console().width > 10_000
    monkeypatch.setenv("COLUMNS", "60")
    assert new_console().width == 60
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert new_console().width == 80
    assert new_console(least_width=110).width == 110


@pytest.mark.parametrize("package", ["conserve_cli", "conserve_lab", "experiments"])
def test_no_program_makes_a_console_of_its_own(package: str) -> None:
    made = [
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Console"
    ]
    assert made == []
