"""The folder of all environments: where it is, who may write there, and who manages it."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from conserve.settings import Settings, SettingsError
from conserve.settings.groups import ENVIRONMENTS_ROOT
from conserve_cli.doctor.findings import Finding, ok, warning
from conserve_tools.sandbox import marked

JOURNAL, LOCK = "journal", "lock"


def folder_of(settings: Settings) -> Path:
    """Return the folder of an application's environments.

    Without a setting for it, the router's port tells the machine's applications apart.
    """
    root = settings.environments.root
    return Path(root or f"{ENVIRONMENTS_ROOT}-{os.getuid()}/{settings.port}")


def require_root(settings: Settings) -> None:
    """Check that the folder is this user's, or can be made; raises `SettingsError`."""
    if not settings.environments.enabled:
        return
    root = folder_of(settings)
    nearest = next(one for one in (root, *root.parents) if one.exists())
    with contextlib.suppress(OSError):
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return
    raise SettingsError(
        f"environments.root: {root} cannot be made, as this user may not write to {nearest}; set a "
        "folder in one that is the user's"
    )


def make_root(root: Path) -> None:
    """Make environments' folder; raises `OSError` unless only this user can write there."""
    root.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    root.mkdir(mode=0o711, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{root} is not a folder of this user's; set environments.root")
    # Commands with users of their own have to pass through.
    root.chmod(0o711)
    above = root.parent.lstat()
    if above.st_uid not in (0, os.geteuid()) or (
        above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    ):
        raise OSError(f"others may replace {root}; set environments.root to another folder")


def take_lock(root: Path) -> int:
    """Become the only manager of these environments; raises `OSError` if there is another."""
    file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise OSError(
            f"another application manages {root}, or did until a moment ago; where it has other "
            "settings, it ends two minutes after its routers, or set environments.root"
        ) from None
    return file


def folders(root: Path) -> Iterable[Path]:
    """Yield the environments' own folders; none if there is no root."""
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.isascii() and path.name.isdecimal():
                yield path


# --- for `conserve doctor` ------------------------------------------------------------------------


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
