"""Checks what a start on this machine needs, before anything runs: files and folders.

That the engines fit is for `deployments.gpu_plans`, and that vLLM takes their arguments for
`deployments.engine_arguments`.
"""

from collections.abc import Callable
from typing import Protocol

from autoscale.capacity.served import with_profile
from conserve.addons import TOOLS, addon
from conserve.settings import Settings, SettingsError
from deployments.model_files import require_adapters, require_files
from deployments.router.access import require_keys
from deployments.router.certificate import require_certificate


class Checked(Protocol):
    """The add-on `conserve_tools`, which needs a folder on the machine of the start."""

    def require_startable(self, settings: Settings) -> None:
        """Raise `SettingsError` if that is missing."""


def require_startable(settings: Settings) -> None:
    """Check the files that the settings name; raises `SettingsError` with all that is wrong."""
    problems: list[str] = []
    checks: list[Callable[[Settings], object]] = [
        require_keys, require_certificate, lambda settings: settings.for_each(with_profile),
        lambda settings: settings.for_each(require_files),
        lambda settings: settings.for_each(require_adapters),
    ]  # fmt: skip
    tools: Checked | None = addon(TOOLS)
    if tools is not None:
        checks.append(tools.require_startable)
    for check in checks:
        try:
            check(settings)
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError(*problems)
