"""Runs a command of an image as a container runtime would; needs root."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_ENTER = Path(__file__).with_name("enter.sh")


class Container:
    """A command in its container. Its output and its volumes are in a folder of its own.

    Attributes:
        process: ends with the command's status, and all that runs there ends with it.
        first: process 1 of the container, as the host sees it.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        user: int,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._environment, self._said = environment, folder / "said"
        volumes = [folder / "models", folder / "kv"]
        for volume in volumes:
            volume.mkdir(exist_ok=True)
            os.chown(volume, user, user)
        with self._said.open("wb") as output:
            started = [str(one) for one in (_ENTER, root, user, *volumes, *command)]
            self.process = subprocess.Popen(started, env=environment, stdout=output, stderr=output)
        while not (inner := psutil.Process(self.process.pid).children()):
            assert self.process.poll() is None, self.said()
        self.first = inner[0]

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def wait_until_said(self, text: str) -> None:
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            time.sleep(0.5)

    def exec(self, *command: str) -> subprocess.Popen[str]:
        """Start another command there, as ``docker exec`` does, but as root."""
        enter = ["nsenter", f"--target={self.first.pid}", "--all", "--root", "--wd", *command]
        return subprocess.Popen(enter, env=self._environment, stdout=-1, stderr=-2, text=True)
