"""``conserve adapters``: what it leaves in the file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from conserve.adapters import adapter_in, read
from conserve.embedded import model_path
from conserve_cli.main import cli
from tests.adapter_files import make_adapter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "adapters.json"


def call(path: Path, *arguments: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "120", "CONSERVE_ADAPTERS_FILE": str(path)})
    return runner.invoke(cli, ["adapters", *arguments])


def test_adapters_are_added_replaced_and_removed(path: Path, tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / name, model_path(), ord(name)) for name in "xy"]
    for name, folder in (("a", folders[0]), ("b", folders[1]), ("a", folders[1])):
        said = call(path, "add", name, str(folder)).stdout
        assert read(path)[name] == adapter_in(name, str(folder))
    assert said.replace("\n", "").endswith("adapters.json has a, b now.")
    assert call(path, "remove", "a").exit_code == 0
    assert [*read(path)] == ["b"]


def test_what_is_no_adapter_is_refused_and_leaves_the_file(path: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "x", model_path(), 1)
    assert call(path, "add", "a", str(folder)).exit_code == 0
    before = path.read_bytes()
    (tmp_path / "x" / "adapter_config.json").write_text("{}")
    for arguments, why in (
        (("add", "b", str(tmp_path)), "adapter_config.json cannot be read"),
        (("add", "b", str(folder)), "it has no rank"),
        (("add", "a@b", str(folder)), "no name for an adapter"),
        (("remove", "b"), "no adapter is named 'b'"),
    ):
        refused = call(path, *arguments)
        assert (refused.exit_code, path.read_bytes()) == (1, before)
        assert why in refused.stderr.replace("\n", "")
