"""Which tests are on engines, and in which order tests run: both follow from a test's fixtures."""

import pytest

from tests.checkout import ROOT
from tests.engines.applications import APPLICATIONS, QUICK, Application

# Every test in these folders is on engines.
_FOLDERS = (ROOT / "tests/acceptance", ROOT / "tests/engines")


def arrange(items: list[pytest.Item]) -> None:
    """Mark the tests on engines, and sort all tests so that each application starts once.

    Those that start Ray or engines by themselves, or use an application that is not among `QUICK`,
    are marked as left out of `make test`, unless they are marked as quick.

    First come tests that need no engine; then those of one application after the other; then
    those that need the machine for themselves.

    Raises:
        pytest.UsageError: a test in their folders is not on engines, or does not say what it wants.
    """
    for item in items:
        if _is_on_engines(item):
            item.add_marker("engines")
            if not _is_quick(item):
                item.add_marker("full")
        elif any(item.path.is_relative_to(folder) for folder in _FOLDERS):
            raise pytest.UsageError(
                f"{item.nodeid} uses neither `application` nor `machine_alone`: "
                "a test without engines belongs in tests/unit"
            )
    items.sort(key=_place)


def _is_on_engines(item: pytest.Item) -> bool:
    # Whatever starts Ray or an engine uses `stage`; a test's names are those of all fixtures that
    # it uses, directly or not.
    return "stage" in _fixtures(item)


def _is_quick(item: pytest.Item) -> bool:
    if "application" in _fixtures(item):
        return wanted(item)[0] in QUICK
    return item.get_closest_marker("quick") is not None


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def wanted(item: pytest.Item) -> tuple[Application, bool]:
    """The application that a test's marker names, and whether the test comes after its others.

    Raises:
        pytest.UsageError: none does.
    """
    marker = item.get_closest_marker("application")
    if marker is None or len(marker.args) != 1 or marker.args[0] not in APPLICATIONS:
        raise pytest.UsageError(
            f"{item.nodeid} does not say which application: mark it so, "
            "by `@pytest.mark.application(MAIN)` for instance"
        )
    return marker.args[0], bool(marker.kwargs.get("last", False))


def _place(item: pytest.Item) -> tuple[int, bool]:
    if not _is_on_engines(item):
        return 0, False
    fixtures = {"application", "machine_alone"}.intersection(_fixtures(item))
    if len(fixtures) != 1:
        raise pytest.UsageError(f"{item.nodeid} uses `application` or `machine_alone`, one of them")
    if fixtures == {"machine_alone"}:
        return 1 + len(APPLICATIONS), False
    application, last = wanted(item)
    return 1 + APPLICATIONS.index(application), last
