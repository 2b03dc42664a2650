"""Every command of docs/start and docs/guides runs as it is written."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.pages.page import PAGES, blocks
from tests.acceptance.pages.shell import Shell

# Not part of a set-up; a page that uses one is skipped where it is not installed.
_PROGRAMS = ("kubectl", "systemd-analyze")


def _cases() -> Iterator[object]:
    for page in PAGES:
        name = f"{page.parent.name}/{page.stem}"
        runs = [block for block in blocks(page.read_text()) if block.runs]
        quick = name == "start/laptop" or not any(block.serves for block in runs)
        if runs:
            yield pytest.param(page, id=name, marks=[pytest.mark.quick] if quick else [])


@pytest.mark.parametrize("page", _cases())
def test_every_command_of_a_page_runs(machine_alone: None, page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    runs = [block for block in blocks(text) if block.runs]
    for program in _PROGRAMS:
        if any(program in block.text for block in runs) and shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    shell = Shell(tmp_path, text)
    try:
        for block in blocks(text):
            if block.file is not None:
                shell.write(block)
        for block in runs:
            shell.run(block)
    finally:
        shell.end()
