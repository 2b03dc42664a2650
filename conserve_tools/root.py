"""The folder of all environments: where it is, who may write there, and who manages it."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from conserve.settings import Settings, SettingsError
from conserve.settings.groups import ENVIRONMENTS_ROOT

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
