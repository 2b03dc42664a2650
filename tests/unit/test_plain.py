"""`make lint` refuses code that is not plain, and packages that outgrow their budget."""

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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of ten lines, with a budget of ten."""
    budgets = tmp_path / "budgets.toml"
    budgets.write_text("[lines]\nsmall = 10\n")
    monkeypatch.setattr(lint_plain, "BUDGETS", budgets)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    file = tmp_path / "small" / "code.py"
    file.write_text("x = 1\n" * 10)
    return file


def test_a_package_within_its_budget_passes(package: Path) -> None:
    assert lint_plain.main([]) == 0


def test_a_package_over_its_budget_fails(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package.write_text(package.read_text() + "x = 1\n")
    assert lint_plain.main([]) == 1
    assert "small has 11 lines, over its budget of 10" in capsys.readouterr().out


def test_a_package_of_docstrings_fails(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package.write_text('"""Hold numbers.\n\nThese are small.\n"""\n' + "x = 1\n" * 6)
    assert lint_plain.main([]) == 1
    assert "docstrings are 40% of its lines" in capsys.readouterr().out
