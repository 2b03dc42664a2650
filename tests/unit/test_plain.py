"""`make lint` refuses code that is not plain."""

import ast
from pathlib import Path

import pytest

from scripts import lint_plain


def complaints(text: str) -> list[str]:
    return [*lint_plain.complaints(Path("file.py"), text, ast.parse(text))]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('"""What is told."""', "begin the docstring with a verb"),
        ('def f():\n    """Of no turn: one that waits."""', "file.py:2: begin the docstring"),
        ('"""Return the turns in line."""', "`in line` in a docstring"),
        ("x = 1  # Nobody waits.", "`Nobody` in a comment"),
        ("def f(a, b, c, d, e, f, g): ...", "`f` takes 7 positional parameters"),
        ("getattr(actor, 'beat').remote(1)", "a remote call by string"),
        ("await core.call_utility_async('pause', 1)", "a remote call by string"),
    ],
)
def test_what_is_not_plain_is_refused(text: str, complaint: str) -> None:
    (found,) = complaints(text)
    assert complaint in found


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the waiting turns."""',
        "x = 'nobody'",
        "class A:\n    def f(self, a, b, c, d, e, f, *, g): ...",
        "@cli.command()\ndef run(a, b, c, d, e, f, g): ...",
        "actor.beat.remote(1)",
        "getattr(actor, method.__name__).remote(1)",
    ],
)
def test_what_is_plain_passes(text: str) -> None:
    assert complaints(text) == []


FIRST = {"core": {"hetero": 4000}, "tests": {"tests/core": 50}}
ALLOWED = {"core": {"hetero": 4300}, "allowances": {"52": {"hetero": 300}}}


@pytest.mark.parametrize(
    ("versions", "rise"),
    [
        ([FIRST, {"core": {"hetero": 3900, "new": 10}, "tests": {"tests/core": 50}}], None),
        ([FIRST, {"core": {"hetero": 4001}}], "hetero has risen from 4000 to 4001"),
        # Raised in an earlier commit, which nobody had checked.
        ([FIRST, {"core": {"hetero": 4001}}, FIRST], "hetero has risen from 4000 to 4001"),
        ([FIRST, {"tests": {"tests/core": 51}}], "tests/core has risen from 50 to 51"),
        ([FIRST, ALLOWED, ALLOWED], None),
        ([FIRST, {**ALLOWED, "core": {"hetero": 4301}}], "hetero has risen from 4000 to 4301"),
        # An allowance is used once.
        (
            [FIRST, ALLOWED, {**ALLOWED, "core": {"hetero": 4000}}, ALLOWED],
            "hetero has risen from 4000 to 4300",
        ),
    ],
)
def test_a_budget_rises_only_by_an_issues_allowance(
    versions: list[lint_plain.Budgets], rise: str | None
) -> None:
    found = [*lint_plain.risen(versions)]
    assert [complaint for complaint in found if rise is None or rise not in complaint] == []
    assert len(found) == (rise is not None)
