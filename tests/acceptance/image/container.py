"""Runs a command of an image as a container runtime would; needs root."""

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

_ENTER = Path(__file__).with_name("enter.sh")


class Container:
    """A running command, whose output and volumes are in a folder of its own."""

    def __init__(
        self, root: Path, folder: Path, *command: str, user: int, environment: Mapping[str, str]
    ) -> None:
        self._environment, self._said = environment, folder / "said"
        volumes = [folder / "models", folder / "kv"]
        for volume in volumes:
            volume.mkdir(exist_ok=True)
            os.chown(volume, user, user)
        with self._said.open("wb") as output:
            started = [str(one) for one in (_ENTER, root, user, *volumes, *command)]
            self._outer = subprocess.Popen(started, env=environment, stdout=output, stderr=output)
        while not (inner := psutil.Process(self._outer.pid).children()):
            assert self._outer.poll() is None, self.said()
        self._inner = inner[0]

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Return the command's status."""
        return self._outer.wait(timeout_s)

    def wait_until_said(self, text: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in self.said():
            assert self._outer.poll() is None, self.said()
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(0.5)

    def wait_until_handled(self, number: int) -> None:
        """Wait until the command has a handler for a signal."""
        caught = 0
        while not caught >> (number - 1) & 1:
            status = Path(f"/proc/{self._inner.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as ``docker stop`` does."""
        self._inner.terminate()

    def exec(self, *command: str) -> subprocess.Popen[str]:
        """Start another command there, as ``docker exec`` does, but as root."""
        enter = ["nsenter", f"--target={self._inner.pid}", "--all", "--root", "--wd", *command]
        return subprocess.Popen(enter, env=self._environment, stdout=-1, stderr=-2, text=True)

    def kill(self) -> None:
        self._outer.kill()
        self._outer.wait()
