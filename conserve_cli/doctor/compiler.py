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

from conserve_cli.doctor.facts import CompilerFacts, Finding, exit_status, ok, wrong


def observe_compiler(environment: Mapping[str, str]) -> CompilerFacts:
    """Look for what Triton compiles with, as ``triton/runtime/build.py`` does."""
    cc, path = environment.get("CC"), environment.get("PATH", os.defpath)
    names = ["gcc", "clang"] if cc is None else [cc]
    found = (shutil.which(name, path=path) for name in names)
    # Debian's Python would otherwise name the folder for packages installed by hand.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    return CompilerFacts(
        python=".".join(platform.python_version_tuple()[:2]),
        cc=cc,
        compiler=next(filter(None, found), ""),
        header=str(header),
        has_header=header.is_file(),
    )


def check_compiler(facts: CompilerFacts | None) -> list[Finding]:
    """Return what is missing on a machine whose engines run on GPUs; None: not looked for."""
    if facts is None:
        return []
    findings = []
    breaks = "Triton compiles with it, and no engine starts on a GPU"
    if not facts.compiler and facts.cc is not None:
        seen = f"CC is {facts.cc!r}, which is no program here: {breaks}"
        to_do = "set CC to the path of a C compiler, without options, or unset it"
        findings.append(wrong("compiler", seen, to_do))
    elif not facts.compiler:
        seen = (
            "no gcc and no clang: Triton compiles with one of them, and no engine starts on a GPU"
        )
        to_do = "install gcc (Debian: apt-get install gcc), or name a C compiler in CC"
        findings.append(wrong("compiler", seen, to_do))
    if not facts.has_header:
        to_do = (
            f"install the headers of Python {facts.python} (Debian: apt-get install "
            f"python{facts.python}-dev)"
        )
        findings.append(wrong("compiler", f"no {facts.header}: {breaks}", to_do))
    return findings or [ok("compiler", f"{facts.compiler}, and headers of Python {facts.python}")]


def main() -> int:
    """Print what is missing for GPUs, and return 1 if something is."""
    findings = check_compiler(observe_compiler(os.environ))
    for finding in findings:
        if finding.to_do:
            sys.stderr.write(f"conserve: {finding.seen}. To do: {finding.to_do}\n")
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main())
