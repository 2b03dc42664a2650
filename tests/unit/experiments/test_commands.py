"""What `make experiment` runs: every experiment says what it measures, and is listed."""

import subprocess
import sys
from importlib import import_module

import pytest

from tests.checkout import ROOT


def _listed() -> list[str]:
    command = [sys.executable, "-m", "experiments"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    assert "make experiment NAME=" in last
    return [line.split(maxsplit=1)[0] for line in lines if line.split(maxsplit=1)[1]]


@pytest.mark.parametrize("name", _listed())
def test_every_experiment_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"experiments.{name}")
    if hasattr(module, "__path__"):
        module = import_module(f"experiments.{name}.__main__")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert (module.__doc__ or "").splitlines()[0] in said
    assert f"python -m experiments.{name}" in said
    assert "--out" in said


def test_every_folder_and_file_with_a_main_is_listed() -> None:
    assert {"table", "suite", "sessions"} <= set(_listed())
    assert not {"harness", "agents", "unkind", "claims"} & set(_listed())
