"""What engines leave in shared memory when they are killed, and its removal.

vLLM's processes talk through POSIX shared memory and semaphores that Python makes: files in
/dev/shm, 400 MB for each engine as far as they are used. A process that ends removes its own; one
that is killed leaves them until the machine starts again.
"""

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

import psutil

logger = logging.getLogger("conserve.shared_memory")

_FOLDER = Path("/dev/shm")
_MADE_BY_PYTHON = ("psm_", "sem.mp-")


def mapped(pids: Iterable[int]) -> set[Path]:
    """The shared memory and semaphores, made by Python, that these processes have in use."""
    inodes = set()
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # It has ended, or is somebody else's.
        for line in text.splitlines():
            # address, permissions, offset, device, inode, path
            if "/dev/shm/" in line:
                inodes.add(int(line.split(maxsplit=5)[4]))
    # Names as shown there would not do: a semaphore had another name when it was mapped.
    return {file for file in _files() if _inode(file) in inodes} if inodes else set()


def _files() -> list[Path]:
    return [file for file in _FOLDER.iterdir() if file.name.startswith(_MADE_BY_PYTHON)]


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None


def remove(files: Iterable[Path]) -> int:
    """Remove the files that are still there; returns how many they were."""
    removed = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
            removed += 1
    return removed


class Leftovers:
    """Removes what engines on this machine leave behind, once every process of theirs is gone.

    Nothing else is touched: only what was seen in use by an engine's own processes. `watch` costs
    nothing, `look` some milliseconds for each engine.
    """

    def __init__(self) -> None:
        self._files: dict[int, set[Path]] = {}
        # The first of each is the replica: a later process with its number is somebody else.
        self._processes: dict[int, list[psutil.Process]] = {}

    def watch(self, pid: int) -> None:
        """Watch a living engine; its processes are this one and all below it."""
        self._files.setdefault(pid, set())

    def look(self) -> None:
        """See what engines use, and remove what those that are gone used."""
        for pid in list(self._files):
            processes = self._processes.setdefault(pid, [])
            with contextlib.suppress(psutil.NoSuchProcess):
                if not processes:
                    processes.append(psutil.Process(pid))
                below = processes[0].children(recursive=True)
                processes += [process for process in below if process not in processes]
            living = [process for process in processes if _lives(process)]
            self._files[pid] |= mapped(process.pid for process in living)
            if not living:
                removed = remove(self._files.pop(pid))
                del self._processes[pid]
                if removed:
                    logger.info("removed %d shared memory files of a lost engine", removed)


def _lives(process: psutil.Process) -> bool:
    try:
        # The number can be another process's by now, which `is_running` can tell.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
