"""How findings are shown."""

from rich.text import Text

from conserve_cli.doctor.findings import Finding

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "bold red"}


def line(finding: Finding) -> Text:
    """One line: how bad it is, where, what was seen, and what to do."""
    where = f"{finding.node} " if finding.node else ""
    text = Text.assemble(
        (f"{finding.level:<8}", _COLOURS[finding.level]),
        (where, "bold"),
        f"{finding.subject}: {finding.seen}",
    )
    if finding.to_do:
        text.append(f". To do: {finding.to_do}", "italic")
    return text
