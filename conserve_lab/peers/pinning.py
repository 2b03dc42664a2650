"""Pins engines to CPU cores, one each, after they have started.

An engine is the process that vLLM calls ``VLLM::EngineCore``, with its workers. Replicas of one
Ray deployment share their environment, so ``VLLM_CPU_OMP_THREADS_BIND`` cannot give each a core
of its own; the affinity of each thread can. An engine that is started anew later is not pinned.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

_ENGINE = "VLLM::EngineCore"
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def autogroup_warning() -> str | None:
    """Say what to change on this machine before engines are pinned, if there is something.

    Where the kernel shares out cores by session, a load generator is in another one than engines.
    It was seen to wait three seconds for a core while two pinned engines had both to themselves.
    """
    try:
        grouped = _AUTOGROUP.read_text().strip() == "1"
    except OSError:
        return None
    if not grouped:
        return None
    return (
        "this kernel shares out cores by session, so that whoever measures may wait seconds for "
        "one: turn that off (sysctl kernel.sched_autogroup_enabled=0) before believing what follows"
    )


def engine_processes() -> list[psutil.Process]:
    """Engines among the descendants of this process, oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(_ENGINE in part for part in process.cmdline()):
                found.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(found)]


def pin(engines: Sequence[psutil.Process], cores: Sequence[int]) -> list[list[int]]:
    """Give each engine its core, and return the cores of each; one engine alone gets them all.

    Raises ValueError for not as many engines as cores, OSError where affinity cannot be set.
    """
    shares = share_out(cores, len(engines))
    for engine, share in zip(engines, shares, strict=True):
        for process in (engine, *engine.children(recursive=True)):
            _pin_threads(process.pid, share)
    return shares


def share_out(cores: Sequence[int], engines: int) -> list[list[int]]:
    """Return each engine's cores; ValueError: there are several, and not as many as cores."""
    shares = [list(cores)] if engines == 1 else [[core] for core in cores]
    if len(shares) != engines:
        raise ValueError(f"{engines} engines for {len(cores)} cores")
    return shares


def _pin_threads(pid: int, cores: list[int]) -> None:
    # Later threads inherit it from those that start them. A helper may have ended meanwhile.
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cores)
