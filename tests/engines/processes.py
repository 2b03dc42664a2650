"""Processes below this one: found, killed, and none left."""

import os
import re
import signal
import time
from collections import Counter

import psutil

_ENDS_WITHIN_S = 10.0
# LMCache's server, by its command line.
LMCACHE = r"deployments\.node\.lmcache_main server"


def processes(pattern: str, below: int | None = None) -> list[psutil.Process]:
    """The processes below this one, or that one, whose command line matches; none if it is gone."""
    found: list[psutil.Process] = []
    try:
        descendants = psutil.Process(below).children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for process in descendants:
        try:
            if re.search(pattern, " ".join(process.cmdline())):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def require_none_left() -> None:
    """Fails if a process below this one runs on.

    Those that have ended and that nobody waits for do not count: Ray, once imported, makes this
    process the parent of orphans. Some end by themselves, up to a second after what they belong to:
    the modules of Ray's dashboard, which a fork server starts, when the dashboard is killed.
    """
    deadline_s = time.monotonic() + _ENDS_WITHIN_S
    while left := [str(process) for process in processes("")]:
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        time.sleep(0.05)


def at_port(port: int, status: str = psutil.CONN_LISTEN) -> Counter[int]:
    """How many connections of this status each process has at a port of its own."""
    found = (one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port)
    return Counter(one.pid for one in found if one.status == status and one.pid)


def kill(pid: int) -> None:
    """``kill -9``, and the process is gone."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while runs(process):
        assert time.monotonic() < deadline_s, f"{pid} outlives its kill"
        time.sleep(0.02)


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that has, and is not waited for, counts as ended."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
