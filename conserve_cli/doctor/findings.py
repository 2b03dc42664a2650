"""Results of checks.

`compiler` imports this file before anything is installed, so it needs only Python's own modules.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; a ``warning`` works, but worse than it could."""

    level: Literal["ok", "note", "warning", "wrong"]
    subject: str
    seen: str
    to_do: str = ""
    node: str = ""  # Empty: this machine, or the whole cluster.


ok, note = partial(Finding, "ok"), partial(Finding, "note")
warning, wrong = partial(Finding, "warning"), partial(Finding, "wrong")


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if something is wrong, else 0."""
    return int(any(finding.level == "wrong" for finding in findings))


def gibibytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
