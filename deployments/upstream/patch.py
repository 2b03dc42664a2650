"""The record of one change to another project, and the check that it still fits."""

import importlib
import inspect
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from conserve.versions import version_of

# Processes that have patches: an engine's HTTP server; every process of an engine, its server
# included; those of them that have a connector to LMCache; a node's LMCache server; a router; and
# any process that starts or joins a Ray.
Process = Literal["server", "engine", "connector", "lmcache", "router", "ray"]
Device = Literal["cpu", "cuda"]

# The releases that patches were tested with, by project, as in a requirement.
VERSIONS = {
    "lmcache": "==0.5.6",
    "nixl": "==1.5.*",
    "ray": "==2.60.*",
    "uvicorn": "==0.54.*",
    "vllm": "==0.32.0",
}
# With this variable set, seams alone are checked, and any version is taken: to try a new release.
ANY_VERSION = "CONSERVE_ANY_VERSION"


class PatchError(RuntimeError):
    """Another project is not as a patch expects it."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A change to another project, or a use of its internals.

    Its file's function `apply` changes a process. Where there is none, the part of the product that
    reaches for the seams calls `require` before.

    Attributes:
        name: its file's name, which names the fault or the limit.
        seams: what it replaces, wraps or reads, as ``module:Class.method``; also attributes that
            only instances have. The first one is of the project that it changes.
        why: what a user would notice without it.
        upstream: the issue or pull request, or a report that could be filed.
        ends: how to see that it is no longer needed. Empty: its first test fails.
        process: where it is applied.
        device: the engines that need it; None: all.
        without: the setting that does without it, for the error; empty if there is none.
    """

    name: str
    seams: tuple[str, ...]
    why: str
    upstream: str
    process: Process
    ends: str = ""
    device: Device | None = None
    without: str = ""

    @property
    def package(self) -> str:
        """Return the project that it changes; `VERSIONS` has the releases."""
        (package,) = re.findall(r"^[a-z]+", self.seams[0])
        return str(package)

    @property
    def versions(self) -> str:
        return VERSIONS[self.package]


def fits(patch: Patch, version: str) -> bool:
    """Return whether a patch was tested with a release of its project."""
    return SpecifierSet(patch.versions).contains(version, prereleases=True)


def require(patch: Patch) -> None:
    """Refuse another project that is not as a patch expects, with a `PatchError` of one line."""
    version = version_of(patch.package)
    known = version is not None and (ANY_VERSION in os.environ or fits(patch, version))
    lacking = [told for seam in patch.seams if known and (told := missing(seam))]
    if known and not lacking:
        return
    what = f"lacks {'; '.join(lacking)}" if lacking else "is another version"
    raise PatchError(
        f"patch {patch.name} is for {patch.package} {patch.versions}, and {patch.package} "
        f"{version or '(not installed)'} {what}. Install the versions that "
        "docs/reference/versions.md names" + (f", or set {patch.without}" if patch.without else "")
    )


def of(owner: str, names: str) -> tuple[str, ...]:
    """Return the seams of a module, or of a class of one, by their names, each after a space."""
    return tuple(f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names.split())


def missing(seam: str) -> str | None:
    """Return what is wrong with a seam; None if it is there."""
    module, _, name = seam.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = _member(found, part)
    except (ImportError, AttributeError) as error:
        return f"{seam} ({error})"
    return None


def _member(owner: Any, name: str) -> Any:
    """Return a member of a module or a class, or of the class's instances; AttributeError."""
    if not inspect.isclass(owner) or hasattr(owner, name):
        return getattr(owner, name)
    for one in owner.__mro__:
        if name in vars(one).get("__annotations__", ()):
            return None
        codes = (getattr(member, "__code__", None) for member in vars(one).values())
        if any(code is not None and name in code.co_names for code in codes):
            return None
    raise AttributeError(f"type object {owner.__name__!r} has no attribute {name!r}")
