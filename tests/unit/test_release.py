"""`make release`: what it refuses, what it makes, and which files are in that."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from conserve import __version__ as version
from tests.checkout import ROOT
from tests.unit.test_layout import LINTER

PACKAGES = tuple(f"{name}/" for name in {*LINTER["root_packages"]} - {"experiments"})
# What only a clone has a use for.
LEFT_OUT = ("README.md", "vllm-router.txt", "-app.yaml", "-aws.yaml", "-aws-requirements.txt")
BESIDE = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
NAMES = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
# Tests that pass or fail at once.
MAKEFILE = 'lint test-all:\n\t@test "$(FAILS)" != $@\n'
CHANGES = (
    f"# Changelog\n\n## [{version}] - 2026-12-01\n\n### Added\n\n- This.\n\n## [0.0.1] - 2026\n"
)


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    # Make prints more if it runs below another one.
    environment = dict.fromkeys(NAMES, "a@b.example") | {"MAKEFLAGS": "--no-print-directory"}
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=os.environ | environment,
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def tracked() -> list[str]:
    """Files of this repository, also those that are not committed yet."""
    files = run(ROOT, "git ls-files --cached --others --exclude-standard").stdout.splitlines()
    return [one for one in files if (ROOT / one).is_file()]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    for one in tracked():
        (folder / one).parent.mkdir(parents=True, exist_ok=True)
        (folder / one).write_bytes((ROOT / one).read_bytes())
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "CHANGELOG.md").write_text(CHANGES)
    assert run(folder, "git init -qb main; git add .; git commit -qm All").returncode == 0
    return folder


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("touch new.txt", "the working tree has changes"),
        ("echo >> README.md", "the working tree has changes"),
        ("git switch -qc other", "releases are made on the branch main"),
        (f"git tag v{version}", f"the tag v{version} exists"),
        ("sed -i s/.2026-.*// CHANGELOG.md; git commit -qam -", "CHANGELOG.md does not begin with"),
        (f"sed -i s/{version}/9.9/ conserve/__init__.py; git commit -qam -",
         "CHANGELOG.md does not begin with `## [9.9] - DATE`"),
        ("export FAILS=lint", "`make lint test-all` failed"),
        ("export FAILS=test-all", "`make lint test-all` failed"),
    ],
)  # fmt: skip
def test_a_release_is_refused(origin: Path, tmp_path: Path, before: str, said: str) -> None:
    run(tmp_path, f"git clone -q {origin} clone")
    done = run(tmp_path / "clone", f"{before}; git tag; {sys.executable} -m scripts.release")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"release: {said}"), done.stderr
    assert not (tmp_path / "clone" / "dist").exists()
    assert run(tmp_path / "clone", "git tag").stdout == done.stdout


def test_a_release_is_tagged_and_has_all_that_runs_and_nothing_else(
    origin: Path, tmp_path: Path
) -> None:
    run(tmp_path, f"git clone -q {origin} clone")
    clone = tmp_path / "clone"
    done = run(clone, f"{sys.executable} -m scripts.release")
    assert done.returncode == 0, done.stderr
    sdist, wheel = map(Path, done.stdout.splitlines()[-2:])
    tag = run(clone, f"git cat-file -p v{version}; git status --porcelain").stdout
    assert tag.endswith(f"\n\nConServe {version}\n\n### Added\n\n- This.\n")

    wanted = {one for one in tracked() if one.startswith(PACKAGES) and not one.endswith(LEFT_OUT)}
    assert {"deployments/router/page/index.html", "autoscale/profiles/cpu-embedded.json"} < wanted
    wanted.add("conserve/commit.txt")
    with zipfile.ZipFile(wheel) as files:
        info = f"conserve-{version}.dist-info/"
        assert {one for one in files.namelist() if not one.startswith(info)} == wanted
        metadata = {*files.read(f"{info}METADATA").decode().splitlines()}
        commit = files.read("conserve/commit.txt").decode().strip()
    assert {f"Version: {version}", "Provides-Extra: cpu", "Provides-Extra: cuda"} < metadata
    assert run(clone, "git rev-parse HEAD").stdout.startswith(commit)
    with tarfile.open(sdist) as archive:
        names = {one.name.partition("/")[2] for one in archive if one.isfile()}
    assert {one for one in names if not one.startswith("conserve.egg-info/")} == wanted | BESIDE
