"""The C compiler: Triton builds its launchers with it on every machine with GPUs.

``make install-gpu`` runs this file before anything is installed, so it imports nothing but Python's
own modules.
"""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from conserve_cli.doctor.facts import CompilerFacts, Finding, exit_status


def observe_compiler(environment: Mapping[str, str]) -> CompilerFacts:
    """Look for what Triton compiles with, where Triton looks (``triton/runtime/build.py``).

    Args:
        environment: the engines' environment.
    """
    cc, path = environment.get("CC"), environment.get("PATH", os.defpath)
    names = ["gcc", "clang"] if cc is None else [cc]
    found = (shutil.which(name, path=path) for name in names)
    # Debian's Python would name the folder of what is installed by hand.
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
    """Say what is missing on a machine whose engines run on GPUs.

    Args:
        facts: None: not looked for.
    """
    if facts is None:
        return []
    findings = []
    if not facts.compiler and facts.cc is not None:
        findings.append(
            Finding(
                "wrong", "compiler", f"CC is {facts.cc!r}, which is no program here: Triton "
                "compiles with it, and no engine starts on a GPU",
                "set CC to the path of a C compiler, without options, or unset it",
            )
        )  # fmt: skip
    elif not facts.compiler:
        findings.append(
            Finding(
                "wrong", "compiler", "no gcc and no clang: Triton compiles with one of them, and "
                "no engine starts on a GPU",
                "install gcc (Debian: apt-get install gcc), or name a C compiler in CC",
            )
        )  # fmt: skip
    if not facts.has_header:
        findings.append(
            Finding(
                "wrong", "compiler", f"no {facts.header}: Triton compiles with it, and no engine "
                "starts on a GPU",
                f"install the headers of Python {facts.python} (Debian: apt-get install "
                f"python{facts.python}-dev)",
            )
        )  # fmt: skip
    return findings or [
        Finding("ok", "compiler", f"{facts.compiler}, and headers of Python {facts.python}")
    ]


def main() -> int:
    """Print what is missing for GPUs, each with what to do; 1 if something is."""
    findings = check_compiler(observe_compiler(os.environ))
    for finding in findings:
        if finding.to_do:
            sys.stderr.write(f"conserve: {finding.seen}. To do: {finding.to_do}\n")
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main())
