"""Looks for the C compiler with which Triton builds its launchers on machines with GPUs.

``make install-gpu`` runs this file before anything is installed, so it imports only Python's own
modules.
"""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from conserve_cli.doctor.findings import Finding, exit_status, ok, wrong


def check_compiler(environment: Mapping[str, str]) -> list[Finding]:
    """Look for the compiler and the headers, as ``triton/runtime/build.py`` does."""
    cc, path = environment.get("CC"), environment.get("PATH", os.defpath)
    names = ["gcc", "clang"] if cc is None else [cc]
    compiler = next(filter(None, (shutil.which(name, path=path) for name in names)), "")
    # Debian's Python would otherwise name the folder for packages installed by hand.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    python = ".".join(platform.python_version_tuple()[:2])
    breaks = "Triton compiles with it, and no engine starts on a GPU"
    findings = []
    if not compiler and cc is not None:
        seen = f"CC is {cc!r}, which is no program here: {breaks}"
        to_do = "set CC to the path of a C compiler, without options, or unset it"
        findings.append(wrong("compiler", seen, to_do))
    elif not compiler:
        seen = (
            "no gcc and no clang: Triton compiles with one of them, and no engine starts on a GPU"
        )
        to_do = "install gcc (Debian: apt-get install gcc), or name a C compiler in CC"
        findings.append(wrong("compiler", seen, to_do))
    if not header.is_file():
        to_do = (
            f"install the headers of Python {python} (Debian: apt-get install python{python}-dev)"
        )
        findings.append(wrong("compiler", f"no {header}: {breaks}", to_do))
    return findings or [ok("compiler", f"{compiler}, and headers of Python {python}")]


def main() -> int:
    """Print what is missing for GPUs, and return 1 if something is."""
    findings = check_compiler(os.environ)
    for finding in findings:
        if finding.to_do:
            sys.stderr.write(f"conserve: {finding.seen}. To do: {finding.to_do}\n")
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main())
