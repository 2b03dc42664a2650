"""Checks what a start on this machine needs, before anything runs: files and folders.

That the engines fit is for `deployments.gpu_plans`, and that vLLM takes their arguments for
`deployments.engine_arguments`.
"""

import contextlib
import os
from collections.abc import Callable

from autoscale.capacity.served import with_profile
from conserve.settings import Settings, SettingsError
from deployments.model_files import require_files
from deployments.router.access import require_keys
from deployments.router.certificate import require_certificate


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
