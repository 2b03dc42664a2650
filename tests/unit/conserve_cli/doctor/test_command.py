"""``conserve doctor`` and its exit status."""

import dataclasses
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from conserve_cli.doctor import command
from conserve_cli.main import cli
from tests.unit.conserve_cli.doctor.sound import MACHINE, NODE


def test_the_command_exits_with_1_when_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    seen = NODE
    monkeypatch.setattr(command, "observe_node", lambda settings: seen)
    sound = CliRunner().invoke(cli, ["doctor"])
    assert sound.exit_code == 0, sound.output
    seen = dataclasses.replace(NODE, machine=dataclasses.replace(MACHINE, shm_total_bytes=0))
    sick = CliRunner().invoke(cli, ["doctor", "decoders=1"])
    assert sick.exit_code == 1
    (wrong,) = [one for one in sick.output.splitlines() if one.startswith("wrong")]
    assert "shared memory" in wrong
    assert "To do: give the container more" in wrong


def test_where_there_is_no_cluster_it_says_so() -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "conserve_cli.main", "doctor", "--address", "127.0.0.1:1"],
        env={**os.environ, "COLUMNS": "400"}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "No Ray cluster at 127.0.0.1:1" in refused.stdout
