"""What is made of other projects' tests: nothing fails or passes unnoticed, and the docs say it."""

import tomllib
from pathlib import Path

import pytest

from tests.acceptance.compatibility import openresponses_suite, vllm_suite
from tests.acceptance.compatibility.outcomes import (
    read,
)
from tests.checkout import ROOT

LISTS = [vllm_suite.LIST, openresponses_suite.LIST]


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_the_docs_have_each_reason_and_how_many_cases_it_is_for(file: Path) -> None:
    text = (ROOT / "docs/reference/apis.md").read_text()
    rows = [f"| {len(entry.cases)} | {entry.reason} |" for entry in read(file)]
    assert rows
    assert [row for row in rows if row not in text] == []


def test_the_tests_are_of_the_version_that_engines_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"vllm=={vllm_suite.VERSION}" in project["optional-dependencies"]["cuda"]
