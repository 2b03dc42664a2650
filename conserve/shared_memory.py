"""Removes the shared memory of processes that were killed.

POSIX shared memory and semaphores that Python makes are files in /dev/shm, which a killed process
leaves. A running engine has none (`named_shared_memory` of deployments/upstream), but other
processes may.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path("/dev/shm")
_MADE_BY_PYTHON = ("psm_", "sem.mp-")


def mapped(pids: Iterable[int]) -> set[Path]:
    """Return the shared memory and semaphores, made by Python, that these processes use."""
    inodes = set()
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # It has ended, or is another user's.
        for line in text.splitlines():
            # address, permissions, offset, device, inode, path
            if "/dev/shm/" in line:
                inodes.add(int(line.split(maxsplit=5)[4]))
    made = (file for file in _FOLDER.iterdir() if file.name.startswith(_MADE_BY_PYTHON))
    # By inode, since a semaphore had another name when it was mapped.
    return {file for file in made if _inode(file) in inodes} if inodes else set()


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None


def remove(files: Iterable[Path]) -> int:
    removed = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
            removed += 1
    return removed
