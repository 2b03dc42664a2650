"""Runs commands in an image as a container runtime would, in namespaces and a chroot; as root."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

# Like the defaults of Docker with --read-only and --tmpfs /tmp:exec: 64 MiB of shared memory, no
# capabilities and no way to get any. The command is process 1. It has a network of its own.
_ENTER = """
set -e
root=$1 user=$2 models=$3 kv=$4
shift 4
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
cd "$root"
mount -t proc proc proc
mount -t tmpfs -o mode=755 tmpfs dev
for one in null zero full random urandom; do touch dev/$one; mount --bind /dev/$one dev/$one; done
ln -s /proc/self/fd dev/fd
mkdir dev/shm
mount -t tmpfs -o mode=1777,size=64m tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
mount --bind "$models" models
mount --bind "$kv" kv
ip link set lo up
exec chroot . setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \\
    --bounding-set=-all --inh-caps=-all "$@"
"""
_NAMESPACES = ["unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child"]


class Container:
    """A running command of an image. Its output is in a file, its volumes in a folder.

    Args:
        root: the image's files.
        environment: all variables of the command.
        folder: has ``models`` and ``kv``, which are made if they are not there.
    """

    def __init__(
        self,
        root: Path,
        environment: Mapping[str, str],
        folder: Path,
        command: Sequence[str],
        user: int,
    ) -> None:
        self._environment = environment
        volumes = [folder / "models", folder / "kv"]
        for volume in volumes:
            volume.mkdir(exist_ok=True)
            os.chown(volume, user, user)
        given = map(str, (root, user, *volumes))
        self._said = folder / "said"
        with self._said.open("wb") as output:
            self._outer = psutil.Popen(
                [*_NAMESPACES, "bash", "-c", _ENTER, "bash", *given, *command],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        while not (inner := self._outer.children()) and self._outer.poll() is None:
            time.sleep(0.01)
        assert inner, self.said()
        self._inner = inner[0]

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def terminate(self) -> None:
        """Send SIGTERM to the command, as `docker stop` does."""
        self._inner.terminate()

    def wait(self, timeout_s: float) -> int:
        """Return the command's status."""
        return self._outer.wait(timeout_s)

    def output(self, timeout_s: float) -> str:
        """Return what the command has printed once it has ended well."""
        assert self.wait(timeout_s) == 0, self.said()
        return self.said()

    def runs(self) -> bool:
        return self._outer.poll() is None

    def handles(self, number: int) -> bool:
        """Return whether the command has a handler for a signal."""
        status = Path(f"/proc/{self._inner.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    def exec(self, *command: str) -> subprocess.Popen[str]:
        """Start another command in the container, as `docker exec` does, but as root."""
        enter = ["nsenter", f"--target={self._inner.pid}", "--all", "--root", "--wd"]
        return subprocess.Popen(
            [*enter, *command], env=self._environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def kill(self) -> None:
        """End all that runs in the container."""
        self._outer.kill()
        self._outer.wait()
