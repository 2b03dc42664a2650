"""Finds tool environments that no application manages."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from conserve.settings import Settings
from conserve_cli.doctor.findings import Finding, ok, warning
from deployments.environments.backends import folders
from deployments.environments.sandbox import marked
from deployments.environments.service import LOCK


def check_environments(settings: Settings) -> Iterator[Finding]:
    """Warn of workspaces and processes that no application would remove (docs/environments.md).

    Only folders that this user may read are seen. Without a setting for the place, those of
    applications on other ports are included.
    """
    root = settings.environments.folder(settings.port)
    roots = [root]
    if settings.environments.root is None:
        roots = sorted(root.parent.iterdir()) if root.parent.is_dir() else []
    for one in roots:
        if one.is_dir() and os.access(one, os.R_OK):
            yield from _check(one)


def _check(root: Path) -> Iterator[Finding]:
    workspaces = sum(1 for _ in folders(root))
    if _is_managed(root):
        yield ok("environments", f"{root} has {workspaces}, and is managed")
        return
    found = [one.pid for one in marked(f"{root}:")]
    if workspaces or found:
        pids = f" (pid {', '.join(map(str, found))})" if found else ""
        yield warning(
            "environments",
            f"{root} has {workspaces} workspaces and {len(found)} processes{pids} that no "
            "application manages",
            "start the application again on the same port, which removes them; or end the "
            f"processes, and remove {root}",
        )


def _is_managed(root: Path) -> bool:
    """Return whether a live manager holds the lock."""
    try:
        with (root / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
