"""A finding: one line of what was seen, and one of what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``ok``; ``note``: worth knowing; ``warning``: it works, but worse; ``wrong``: it
            does not work.
        subject: what was looked at, in a word or two.
        seen: what was found.
        to_do: what an operator can do; empty if nothing is to be done.
        node: where; empty: on this machine, or on the whole cluster.
    """

    level: Level
    subject: str
    seen: str
    to_do: str = ""
    node: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """1 when something is wrong, else 0."""
    return int(any(finding.level == "wrong" for finding in findings))


def gibibytes(size_bytes: float) -> str:
    """A size as people write it."""
    return f"{size_bytes / 2**30:.1f} GiB"
