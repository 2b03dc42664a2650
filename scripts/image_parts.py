"""Trims and lists what is in an image; `deploy/Containerfile` runs it, beside pyproject.toml.

`trim EXTRA...` removes packages that ConServe with these extras does not need: tools of its tests.
`sbom` prints the packages that are left, Python's and Debian's, as CycloneDX 1.6.
"""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_INSTALLED = {canonicalize_name(one.name): one for one in distributions()}
_QUERY = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"]


def _needed(requirements: list[str]) -> set[str]:
    """Return the installed packages that these need, and those need in turn."""
    seen: set[tuple[str, str]] = set()
    left = [(one, "") for one in requirements]
    while left:
        text, extra = left.pop()
        one = Requirement(text)
        if one.marker and not one.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(one.name)
        for pair in {(name, own) for own in ("", *one.extras)} - seen:
            seen.add(pair)
            if name in _INSTALLED:
                left += [(below, pair[1]) for below in _INSTALLED[name].requires or []]
    return {name for name, _ in seen}


def _trim(extras: list[str]) -> None:
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
    roots = sum((project["optional-dependencies"][one] for one in extras), project["dependencies"])
    spare = _INSTALLED.keys() - _needed([*roots, "pip"])
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-y", "-q", *spare], check=True)


def _sbom() -> None:
    debian = (line.split() for line in subprocess.check_output(_QUERY, text=True).splitlines())
    urls = [(n, v, f"pkg:deb/debian/{n}@{v}?arch={machine}") for n, v, machine in debian]
    urls += [(o.name, o.version, f"pkg:pypi/{n}@{o.version}") for n, o in _INSTALLED.items()]
    listed = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": [
        {"type": "library", "name": name, "version": version, "purl": url.replace("+", "%2B")}
        for name, version, url in sorted(urls)
    ]}  # fmt: skip
    print(json.dumps(listed, indent=1))


if sys.argv[1] == "trim":
    _trim(sys.argv[2:])
else:
    _sbom()
