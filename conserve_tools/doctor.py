"""Finds, for `conserve doctor`, environments that no application manages."""

import fcntl
import os
from pathlib import Path

from conserve.settings import Settings
from conserve_cli.doctor.findings import Finding, ok, warning
from conserve_tools.root import LOCK, folder_of, folders
from conserve_tools.sandbox import marked


def findings(settings: Settings) -> list[Finding]:
    """Warn of workspaces and processes on this machine that no application would remove.

    Without a setting for the folder, those of applications on other ports are included.
    """
    root = folder_of(settings)
    roots = [root]
    if settings.environments.root is None:
        roots = sorted(root.parent.iterdir()) if root.parent.is_dir() else []
    readable = [one for one in roots if one.is_dir() and os.access(one, os.R_OK)]
    return [finding for one in readable if (finding := _finding(one)) is not None]


def _finding(root: Path) -> Finding | None:
    workspaces = sum(1 for _ in folders(root))
    if _is_managed(root):
        return ok("environments", f"{root} has {workspaces}, and is managed")
    left = [one.pid for one in marked(f"{root}:")]
    if not workspaces and not left:
        return None
    pids = f" (pid {', '.join(map(str, left))})" if left else ""
    return warning(
        "environments",
        f"{root} has {workspaces} workspaces and {len(left)} processes{pids} that no application "
        "manages",
        "start the application again on the same port, which removes them; or end the processes, "
        f"and remove {root}",
    )


def _is_managed(root: Path) -> bool:
    """Return whether a live manager holds the lock."""
    try:
        with (root / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False
