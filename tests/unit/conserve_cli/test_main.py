"""``conserve`` itself: what its help says, and what it loads for a command."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from conserve import addons
from conserve_cli.main import ORDER, cli, commands

# Runs the command, then tells what was imported for it on the last line of the standard error.
_SCRIPT = """
import json, sys
from conserve_cli.main import cli
try:
    cli(sys.argv[1:], prog_name="conserve")
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def _called(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A command in a process of its own, and the modules that were loaded for it."""
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, set(json.loads(done.stderr.splitlines()[-1]))


def test_those_who_serve_do_not_wait_for_what_measures() -> None:
    done, loaded = _called("serve", "--help")
    assert done.returncode == 0, done.stderr
    assert "stay until Ctrl-C" in done.stdout
    packages = {name.partition(".")[0] for name in loaded}
    assert not packages & {"matplotlib", "numpy", "ray"}


def test_the_version_is_said_with_those_of_what_it_runs_on() -> None:
    done, loaded = _called("--version")
    assert done.returncode == 0, done.stderr
    said = dict(line.split() for line in done.stdout.splitlines())
    assert list(said) == ["conserve", "commit", "build", "vllm", "lmcache", "ray"]
    assert said["ray"] == importlib.metadata.version("ray")
    assert not {name.partition(".")[0] for name in loaded} & {"vllm", "ray", "lmcache", "torch"}


def test_the_help_has_every_command_and_its_line_in_order() -> None:
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(cli, ["--help"])
    assert shown.exit_code == 0
    rows = [line.strip("│ \n").split(maxsplit=1) for line in shown.output.splitlines()]
    said = [tuple(row) for row in rows if row and row[0] in ORDER]
    assert said == [(name, line) for name, (_, line) in commands().items()]
    assert tuple(name for name, _ in said) == ORDER


@pytest.mark.parametrize("name", ORDER)
def test_every_command_is_there_and_has_a_help_of_its_own(name: str) -> None:
    shown = CliRunner().invoke(cli, [name, "--help"], prog_name="conserve")
    assert shown.exit_code == 0, shown.output
    assert f"Usage: conserve {name} " in shown.output


def test_a_command_whose_add_on_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = importlib.metadata.EntryPoint(
        "conserve_lab", "conserve_gone.commands:COMMANDS", "conserve.commands"
    )
    monkeypatch.setattr(addons, "entry_points", lambda group: [missing])
    runner = CliRunner(env={"COLUMNS": "200"})
    assert " serve " in (shown := runner.invoke(cli, ["--help"]).output)
    assert " bench " not in shown
    refused = runner.invoke(cli, ["bench", "report.json"])
    assert refused.exit_code == 2
    assert "bench needs the add-on conserve_lab, which is not installed" in refused.output


def test_a_command_that_needs_another_missing_add_on_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in [
        one for one in sys.modules if one.startswith(("conserve_tools", "conserve_lab"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "conserve_tools", None)
    refused = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["demo"])
    assert refused.exit_code == 2
    assert "demo needs the add-on conserve_tools, which is not" in refused.output
