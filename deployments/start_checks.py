"""Checks what a start on this machine needs, before anything runs: files, folders, and ports.

That the engines fit is for `deployments.gpu_plans`, and that vLLM takes their arguments for
`deployments.engine_arguments`.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from autoscale.capacity.served import with_profile
from conserve.settings import Settings, SettingsError
from deployments.model_files import require_files
from deployments.node.lmcache_server import is_free, refused
from deployments.router.access import require_keys
from deployments.router.certificate import require_certificate

# How far above a port that is taken a free one is looked for.
_LOOKED = 100


def require_startable(settings: Settings) -> None:
    """Check the files that the settings name; raises `SettingsError` with all that is wrong."""
    problems: list[str] = []
    checks: tuple[Callable[[Settings], object], ...] = (
        require_keys, require_certificate, with_profile, require_files, _require_root,
    )  # fmt: skip
    for check in checks:
        try:
            check(settings)
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError(*problems)


def busy_ports(settings: Settings) -> Iterator[str]:
    """Yield a line for each port of the settings on which this user could not listen now."""
    lmcache = settings.lmcache
    taken = {settings.port, lmcache.port, lmcache.http_port}
    # On several nodes LMCache listens on its node's address.
    host = "0.0.0.0" if settings.nodes == "several" else "127.0.0.1"
    for setting, purpose, where, port in (
        ("port", "the router", settings.host, settings.port),
        ("lmcache.port", "LMCache's server", host, lmcache.port),
        ("lmcache.port", "LMCache's admin interface", "127.0.0.1", lmcache.http_port),
    ):
        number = refused(where, port) if port else None
        if number is None:
            continue
        # LMCache takes two in a row.
        needed = 1 if setting == "port" else 2
        free = _free_from(where, max(port, 1023) + 1, needed, taken)
        other = f"{setting}={free}" if free else "another"
        if number == errno.EADDRINUSE:
            yield (
                f"{setting}: {port}, for {purpose}, is in use here; stop what listens there, or "
                f"set {other}"
            )
        elif number in (errno.EACCES, errno.EPERM):
            yield f"{setting}: {port} is for privileged users (below 1024); set {other}"
        else:
            yield f"host: {where} is no address of this machine; give one that is, or 127.0.0.1"


def _free_from(host: str, first: int, count: int, taken: set[int]) -> int | None:
    for port in range(first, min(first + _LOOKED, 65535)):
        ports = set(range(port, port + count))
        if not ports & taken and all(is_free(host, one) for one in ports):
            return port
    return None


def _require_root(settings: Settings) -> None:
    """Check that environments' folder is this user's, or can be made."""
    if not settings.environments.enabled:
        return
    root = settings.environments.folder(settings.port)
    nearest = root
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    with contextlib.suppress(OSError):
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return
    raise SettingsError(
        f"environments.root: {root} cannot be made, as this user may not write to {nearest}; set a "
        "folder in one that is the user's"
    )
