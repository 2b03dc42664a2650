"""Tests on engines share their fixtures with those of another folder."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures once, whichever folders run: one application serves all its tests."""
    config.pluginmanager.import_plugin("tests.engines.fixtures")
