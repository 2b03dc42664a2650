"""A Python for tests of set-ups: it makes environments and runs pip, and fetches nothing."""

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.checkout import ROOT, pins

# What `make` and the cluster files use, all of it part of any Debian but make.
_TOOLS = (
    "awk", "bash", "cat", "cp", "env", "find", "grep", "ln", "make", "mkdir", "rm", "tail", "tee",
    "touch",
)  # fmt: skip
# `python3.11` in such a machine's path, and `python` in each environment that it makes. pip takes
# what it is told to install from an index on disk, for real, and only says what it would do.
_SCRIPT = """#!/usr/bin/env bash
set -eo pipefail
case "$*" in
"-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    touch "$3/bin/ray" "$3/bin/serve" "$3/bin/conserve" ;;
"-m pip install "*)
    echo "asked: ${{@:4}}" >> {log}
    {real} -m pip install --dry-run --ignore-installed --no-deps --index-url file://{index} \\
        "${{@:4}}" | tee -a {log} ;;
"-m conserve_cli.doctor.compiler")
    exec {real} -c "{check}" ;;
*)
    exec {real} "$@" ;;
esac
"""
# The compiler is the machine's own affair, not the test's: it is any program.
_CHECK = """
import os, sys, sysconfig
os.environ['CC'] = '/bin/sh'
sysconfig.get_paths = lambda _: {{'include': '{headers}'}}
from conserve_cli.doctor.compiler import main
sys.exit(main())
"""


class StandInMachine:
    """A machine without a network, as `make` and `ray up` find it.

    Attributes:
        home: the user's home, empty at first.
        headers: where its Python's headers are.
    """

    def __init__(self, folder: Path, *requirements: str) -> None:
        """Make its folders, its programs and the packages that pip can have.

        Args:
            folder: an empty folder for all of it.
            requirements: files of pinned versions, which its pip can have; empty, so that their
                hashes are left out of the copies in its home.
        """
        self.home, self.headers = folder / "home", folder / "headers"
        self._log, index = folder / "pip.log", folder / "index"
        self._programs = folder / "programs"
        for one in (self.home, self.headers, self._programs, index):
            one.mkdir()
        for tool in _TOOLS:
            (self._programs / tool).symlink_to(str(shutil.which(tool)))
        (self.headers / "Python.h").touch()
        for pin in {pin for file in requirements for pin in pins(file)}:
            name, _, version = pin.replace("===", "==").partition("==")
            _publish(index, name, version)
        script = self._programs / "python3.11"
        script.write_text(
            _SCRIPT.format(
                real=shlex.quote(sys.executable), index=index, log=self._log,
                check=_CHECK.format(headers=self.headers).strip().replace("\n", "; "),
            )
        )  # fmt: skip
        script.chmod(0o755)
        # Nothing of who runs the tests: neither their make's variables nor their pip's settings.
        self._environment = {
            "HOME": str(self.home),
            "PATH": str(self._programs),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell's command in the home."""
        return subprocess.run(
            [str(self._programs / "bash"), "-c", command],
            cwd=self.home, env=self._environment, capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip

    def copy(self, mounts: Mapping[str, str], ignored: Sequence[str] = ()) -> None:
        """Copy files and folders of this repository.

        Args:
            mounts: where each goes, under ``~/``, and what it is called here.
            ignored: names that are left out of folders.
        """
        for there, here in mounts.items():
            source, target = ROOT / here, self.home / there.removeprefix("~/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignored))
            elif "requirements" in source.name:
                target.write_text(re.sub(r" \\\n +--hash=\S+", "", source.read_text()))
            else:
                shutil.copy(source, target)

    def lose(self, program: str) -> None:
        """Take a program away."""
        (self._programs / program).unlink()

    def asked(self) -> list[str]:
        """The arguments of each `pip install` so far."""
        return self._said("asked: ")

    def installed(self) -> set[str]:
        """All that pip would have installed for it, such as ``ray-2.60.0``."""
        return {one for line in self._said("Would install ") for one in line.split()}

    def _said(self, beginning: str) -> list[str]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line.removeprefix(beginning) for line in lines if line.startswith(beginning)]


def _publish(index: Path, name: str, version: str) -> None:
    folder = index / canonicalize_name(name)
    folder.mkdir(exist_ok=True)
    wheel = write_wheel(folder, name, version)
    with (folder / "index.html").open("a") as page:
        page.write(f'<a href="{wheel.name}">{wheel.name}</a>\n')


def write_wheel(folder: Path, name: str, version: str) -> Path:
    """Write a package without anything in it, and return its file."""
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        "RECORD": "",
    }
    name = name.replace("-", "_")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{name}-{version}.dist-info/{file}", text)
    return path
