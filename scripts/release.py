"""Makes a release of the version in conserve/__init__.py: all but the upload; `make release`.

It refuses a tree with changes, another branch than main, a tag that exists, a CHANGELOG.md that
begins with no such version, and tests that fail. It builds the sdist from the commit and the wheel
from the sdist, checks that the wheel names the commit, and makes an annotated tag.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from conserve import __version__ as version

_TESTS = ["make", "lint", "test-all"]
_WHEEL = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]


def _said(*command: str | Path, cwd: str = ".") -> str:
    return subprocess.run(command, check=True, stdout=-1, text=True, cwd=cwd).stdout.strip()


def _notes() -> str:
    """Return what CHANGELOG.md says of this version; empty: it does not begin with it."""
    _, _, parts = Path("CHANGELOG.md").read_text().partition("\n## ")
    heading, _, text = parts.partition("\n## ")[0].partition("\n")
    dated = re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading)
    return text.strip() if dated else ""


def _refusal() -> str | None:
    if _said("git", "status", "--porcelain"):
        return "the working tree has changes: commit or remove them"
    if _said("git", "branch", "--show-current") != "main":
        return "releases are made on the branch main"
    if _said("git", "tag", "--list", f"v{version}"):
        return f"the tag v{version} exists: raise __version__ in conserve/__init__.py"
    if not _notes():
        return f"CHANGELOG.md does not begin with `## [{version}] - DATE` and what is new in it"
    return f"`{' '.join(_TESTS)}` failed" if subprocess.run(_TESTS).returncode else None


if why := _refusal():
    sys.exit(f"release: {why}")
dist = Path("dist").absolute()
sdist, wheel = (dist / f"conserve-{version}{end}" for end in (".tar.gz", "-py3-none-any.whl"))
with tempfile.TemporaryDirectory() as clone:
    _said("git", "clone", "--quiet", ".", clone)
    _said(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", dist, cwd=clone)
_said(sys.executable, *_WHEEL, dist, sdist)
named = zipfile.ZipFile(wheel).read("conserve/commit.txt").decode().strip()
if named != _said("git", "rev-parse", "--short=12", "HEAD"):
    sys.exit(f"release: {wheel} says that it is from the commit {named}")
message = f"ConServe {version}\n\n{_notes()}"
_said("git", "tag", "--annotate", "--cleanup=whitespace", f"v{version}", "-m", message)
print(f"release: v{version} is tagged. Publish it: git push origin v{version}, and upload")
print(sdist, wheel, sep="\n")
