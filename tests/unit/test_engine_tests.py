"""Tests on engines are known by their fixtures: how they are marked and sorted, or refused."""

import pytest

# Loaded here, so that the tests within these tests have the same each time: what they load is
# unloaded again, but not from the package that other tests have loaded.
from tests.engines import applications, order  # noqa: F401

pytest_plugins = ["pytester"]

_FIXTURES = """
from pathlib import Path
import pytest
from tests.engines import order

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    order.arrange(items, Path(__file__).parent / "engines")

@pytest.fixture
def stage(): ...

@pytest.fixture
def application(stage): ...

@pytest.fixture
def machine_alone(stage): ...

@pytest.fixture
def cluster(machine_alone): ...
"""
_HEAD = """
import pytest
from tests.engines.applications import MAIN, SMALL

"""


@pytest.fixture
def collected(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with tests of every kind, the wrong way round."""
    # Plugins are of no concern, and take a second to find.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(_FIXTURES)
    pytester.makeini(
        "[pytest]\nmarkers =\n    application\n    engines\naddopts = --strict-markers"
    )
    for file, text in {
        "engines/test_a.py": "def test_alone(cluster): ...",
        "engines/test_b.py": "@pytest.mark.application(SMALL)\ndef test_small(application): ...",
        "engines/test_c.py": """
pytestmark = pytest.mark.application(MAIN, last=True)
def test_fault(application): ...
""",
        "engines/test_d.py": "@pytest.mark.application(MAIN)\ndef test_main(application): ...",
        "unit/test_e.py": """
@pytest.fixture
def application(): ...
def test_own_application(application): ...
def test_unit(): ...
""",
    }.items():
        add(pytester, file, text)
    return pytester


def add(pytester: pytest.Pytester, file: str, text: str) -> None:
    path = pytester.path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{_HEAD}{text}\n")


def names(pytester: pytest.Pytester, *options: str) -> list[str]:
    done = pytester.runpytest_inprocess("--collect-only", "-q", *options)
    return [line.partition("::")[2] for line in done.outlines if "::" in line]


def test_units_come_first_then_each_application_and_who_kills_its_engines_last(
    collected: pytest.Pytester,
) -> None:
    units, engines = (
        ["test_own_application", "test_unit"],
        ["test_main", "test_fault", "test_small", "test_alone"],
    )
    assert names(collected) == units + engines
    assert names(collected, "-m", "engines") == engines
    assert names(collected, "-m", "not engines") == units


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def test_odd(): ...", "uses neither `application` nor `machine_alone`"),
        ("def test_odd(stage): ...", "uses `application` or `machine_alone`, one of them"),
        ("def test_odd(application): ...", "does not say which application"),
        (
            "@pytest.mark.application(MAIN)\ndef test_odd(application, cluster): ...",
            "uses `application` or `machine_alone`, one of them",
        ),
        (
            "@pytest.mark.application('main')\ndef test_odd(application): ...",
            "does not say which application",
        ),
    ],
)
def test_a_test_that_does_not_say_what_it_runs_on_is_refused(
    collected: pytest.Pytester, text: str, said: str
) -> None:
    add(collected, "engines/test_z.py", text)
    done = collected.runpytest_inprocess("--collect-only", "-q")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert f"engines/test_z.py::test_odd {said}" in done.stderr.str() + done.stdout.str()
