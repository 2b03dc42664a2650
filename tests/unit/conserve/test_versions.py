"""Tests how ConServe names its own code, and refuses other projects' packages of its names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conserve import versions
from tests.checkout import ROOT


def test_code_without_git_says_its_commit_if_it_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_HERE", tmp_path)
    assert versions.build() == ("unknown", "copy")
    (tmp_path / versions.STAMP).write_text("1a2b3c4d5e6f\n")
    assert versions.build() == ("1a2b3c4d5e6f", "wheel")


@pytest.mark.parametrize("other", ["a folder", "a distribution"])
def test_another_package_of_one_of_the_names_is_refused(other: str, tmp_path: Path) -> None:
    folder = tmp_path / ("deployments" if other == "a folder" else "evolve-1.0.dist-info")
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "METADATA").write_text("Name: evolve\nVersion: 1.0\n")
    (folder / "top_level.txt").write_text("evolve\nhetero\n")
    said = f"the package deployments is not ConServe's here, but {folder}: start ConServe from"
    if other == "a distribution":
        said = "evolve installed a package hetero in the place of ConServe's: it needs an"
    for program in (
        ["-m", "conserve_cli.main", "serve", "--plan"],
        ["-c", "import conserve; conserve.app"],
    ):
        done = subprocess.run(
            [sys.executable, *program], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode in (1, 2)
        *stack, last = done.stderr.splitlines()
        assert last.removeprefix("ImportError: ").startswith(said)
        assert not stack or program[0] == "-c"
