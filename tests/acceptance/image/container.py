"""Runs a command of an image as a container runtime would; needs root."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

_ENTER = Path(__file__).with_name("enter.sh")


class Container:
    """A command in its container; its output and its volumes are in a folder of its own.

    Attributes:
        process: ends with the command's status, and all that runs there ends with it.
        first: process 1 of the container, as the host sees it.
    """

    def __init__(
        self, root: Path, user: int, folder: Path, command: Sequence[str], variables: dict[str, str]
    ) -> None:
        self._variables, self._said = variables, folder / "said"
        started = [str(one) for one in (_ENTER, root, user, folder, *command)]
        with self._said.open("wb") as output:
            self.process = subprocess.Popen(started, env=variables, stdout=output, stderr=output)
        while not (inner := psutil.Process(self.process.pid).children()):
            assert self.process.poll() is None, self.said()
        self.first = inner[0]

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def exec(self, *command: str) -> subprocess.Popen[str]:
        """Start another command there, as ``docker exec`` does, but as root."""
        enter = ["nsenter", f"--target={self.first.pid}", "--all", "--root", "--wd", *command]
        return subprocess.Popen(enter, env=self._variables, stdout=-1, stderr=-2, text=True)
