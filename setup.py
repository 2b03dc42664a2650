"""Writes into what is built the commit that it is from, which `conserve --version` prints.

All else of the build is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from conserve.versions import STAMP, build  # noqa: E402


def stamp(folder: str) -> None:
    # In an unpacked sdist, this is what the sdist says.
    Path(folder, "conserve", STAMP).write_text(f"{build()[0]}\n")


class BuildPy(build_py):
    """Builds the packages, and says of which commit."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            stamp(self.build_lib)


class Sdist(sdist):
    """Makes the source distribution, from which a wheel is built without Git."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        stamp(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
