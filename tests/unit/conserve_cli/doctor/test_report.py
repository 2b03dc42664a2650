"""Findings as they are shown."""

from conserve_cli.doctor.command import line
from conserve_cli.doctor.facts import Finding


def test_a_finding_is_one_line_that_ends_with_what_to_do() -> None:
    shown = line(Finding("wrong", "port", "8000 is taken", "stop it", "10.0.0.2"))
    assert shown.plain == "wrong   10.0.0.2 port: 8000 is taken. To do: stop it"
    assert line(Finding("ok", "disk", "9 GiB free")).plain == "ok      disk: 9 GiB free"
