"""What is printed into a pipe is whole: no table is cut or folded to the width of a terminal."""

import os
import subprocess
import sys

import pytest

from conserve_cli.output import new_console
from tests.checkout import ROOT

PROFILE = "a40-qwen3-0.6b"


def _piped(module: str, *arguments: str) -> list[str]:
    """The lines that a program writes into a pipe."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "…" not in done.stdout
    return done.stdout.splitlines()


def test_a_table_that_is_wider_than_a_terminal_is_whole_in_a_pipe() -> None:
    systems = ["conserve", "collocated", "full_disaggregation", "per_turn", "affinity"]
    options = [part for system in systems for part in ("--system", system)]
    lines = _piped(
        *("conserve_cli.main", "simulate", "--profile", PROFILE, "--conversations", "2"), *options
    )
    heads = [line for line in lines if line.split() == systems]
    assert len(heads) == 2
    assert all(len(head) > 80 for head in heads)


def test_a_terminal_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert new_console().width > 10_000
    monkeypatch.setenv("COLUMNS", "60")
    assert new_console().width == 60
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert new_console().width == 80
    assert new_console(least_width=110).width == 110
