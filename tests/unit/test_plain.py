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
