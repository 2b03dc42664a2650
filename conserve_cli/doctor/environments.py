"""Finds what is left of tool environments that no application manages; see docs/environments.md."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from conserve.settings import Settings
from conserve_cli.doctor.facts import EnvironmentFacts, Finding
from deployments.environments.processes import folders
from deployments.environments.sandbox import marked
from deployments.environments.service import LOCK


def observe_environments(settings: Settings) -> list[EnvironmentFacts]:
    """Environments' folders on this machine, as far as this user may see them.

    Those of applications on other ports are among them, unless a setting names another place.
    """
    root = settings.environments.folder(settings.port)
    roots = [root]
    if settings.environments.root is None:
        roots = sorted(root.parent.iterdir()) if root.parent.is_dir() else []
    return [_observe(one) for one in roots if one.is_dir() and os.access(one, os.R_OK)]


def _observe(root: Path) -> EnvironmentFacts:
    managed = _is_managed(root)
    left = () if managed else tuple(one.pid for one in marked(f"{root}:"))
    return EnvironmentFacts(str(root), managed, sum(1 for _ in folders(root)), left)


def _is_managed(root: Path) -> bool:
    """Whether a manager lives, which holds the lock as long as it does."""
    try:
        with (root / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def check_environments(seen: Iterable[EnvironmentFacts]) -> list[Finding]:
    """Workspaces and processes that nobody would remove."""
    findings = []
    for one in seen:
        if one.managed:
            said = f"{one.root} has {one.workspaces}, and is managed"
            findings.append(Finding("ok", "environments", said))
        elif one.workspaces or one.pids:
            pids = f" (pid {', '.join(map(str, one.pids))})" if one.pids else ""
            findings.append(
                Finding(
                    "warning", "environments",
                    f"{one.root} has {one.workspaces} workspaces and {len(one.pids)} processes"
                    f"{pids} that no application manages",
                    "start the application again on the same port, which removes them; or end the "
                    f"processes, and remove {one.root}",
                )
            )  # fmt: skip
    return findings
