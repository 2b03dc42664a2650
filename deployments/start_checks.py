"""Checks what a start on this machine needs, before anything runs: files and folders.

That the engines fit is for `deployments.gpu_plans`, and that vLLM takes their arguments for
`deployments.engine_arguments`.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from autoscale.capacity.served import with_profile
from conserve.addons import offered
from conserve.settings import Settings, SettingsError
from deployments.model_files import require_files
from deployments.router.access import require_keys
from deployments.router.certificate import require_certificate


@runtime_checkable
class Checked(Protocol):
    """An add-on that needs something of the machine on which the application starts."""

    def require_startable(self, settings: Settings) -> None:
        """Raise `SettingsError` if that is missing."""


def require_startable(settings: Settings) -> None:
    """Check the files that the settings name; raises `SettingsError` with all that is wrong."""
    problems: list[str] = []
    checks: tuple[Callable[[Settings], object], ...] = (
        require_keys, require_certificate, with_profile, require_files,
        *(one.require_startable for one in offered("conserve.addons").values()
          if isinstance(one, Checked)),
    )  # fmt: skip
    for check in checks:
        try:
            check(settings)
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError(*problems)
