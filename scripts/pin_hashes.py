"""Writes the hashes that indexes have of pinned packages into requirements-*.txt; `make hashes`.

uv has to be installed, and to find torch's CPU build (UV_INDEX, UV_FIND_LINKS).
"""

import subprocess
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name

_UV = ["uv", "pip", "compile", "-", "--no-deps", "--quiet", "--format", "pylock.toml"]
# Wheels for older systems than these fit, too, and so are named.
_X86, _ARM = "x86_64-manylinux_2_36", "aarch64-manylinux_2_36"
_GPU = [(python, machine) for python in ("3.11", "3.12") for machine in (_X86, _ARM)]

for kind, runs in {"cpu": [("3.11", _X86)], "gpu": _GPU}.items():
    file = Path(f"requirements-{kind}.txt")
    head, _, rest = file.read_text().partition("\n\n")
    pins = [line.split()[0] for line in rest.splitlines() if "==" in line]
    hashes: dict[str, set[str]] = {canonicalize_name(pin.split("=")[0]): set() for pin in pins}
    for python, machine in runs:
        command = [*_UV, "--python-version", python, "--python-platform", machine]
        done = subprocess.run(command, input="\n".join(pins), stdout=-1, text=True, check=True)
        for one in tomllib.loads(done.stdout)["packages"]:
            for wheel in one.get("wheels") or [one["sdist"]]:
                hashes[one["name"]].add(f"--hash=sha256:{wheel['hashes']['sha256']}")
    lines = zip(pins, map(sorted, hashes.values()), strict=True)
    text = "\n".join(" \\\n    ".join([pin, *own]) for pin, own in lines)
    file.write_text(f"{head}\n\n{text}\n")
