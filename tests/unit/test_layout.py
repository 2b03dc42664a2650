"""The floors: what `make lint` refuses, and what CONTRIBUTING.md says of them."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINTER = PROJECT["tool"]["importlinter"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and their contracts, to be spoilt."""
    folder = tmp_path_factory.mktemp("copy")
    for package in LINTER["root_packages"]:
        shutil.copytree(ROOT / package, folder / package, ignore=_all_but_code)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _all_but_code(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if Path(folder, name).is_file() and not name.endswith(".py")}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make lint` says of imports there."""
    shown = subprocess.run(
        ["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (command,) = (line for line in shown.stdout.splitlines() if "lint-imports" in line)
    program, *options = command.split()
    return subprocess.run(
        [str(ROOT / program), *options], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("conserve/conversations/table.py", "import deployments.messages"),
        ("conserve/admission/queue.py", "import ray"),
        ("hetero/tiers.py", "import deployments.messages"),
        ("deployments/node/node.py", "import deployments.engine.engine"),
        ("deployments/table_client.py", "import deployments.table.table"),
        ("conserve_lab/driver.py", "import deployments.messages"),
        ("deployments/router/router.py", "import conserve_tools.routes"),
        ("conserve_tools/ledger.py", "import deployments.table_client"),
    ],
)
def test_an_import_that_goes_up_a_floor_fails_the_lint(copy: Path, file: str, line: str) -> None:
    path = copy / file
    kept = path.read_text()
    path.write_text(f"{kept}\n{line}\n")
    try:
        done = lint(copy)
    finally:
        path.write_text(kept)
    assert done.returncode == 1, done.stdout
    importer = file.removesuffix(".py").replace("/", ".")
    assert f"{importer} -> {line.removeprefix('import ')}" in done.stdout


def test_contributing_says_of_each_package_what_it_may_import() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\w+)/` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    said = {package: set(re.findall(r"`(\w+)`", may)) for package, may in rows}
    floors = [
        {name.strip() for name in floor.split("|")} for floor in LINTER["contracts"][0]["layers"]
    ]
    wanted = {
        package: set().union(*floors[number + 1 :])
        for number, floor in enumerate(floors)
        for package in floor
    }
    assert said == wanted
