"""What the README shows of settings is what the code accepts."""

import ast
import re
import subprocess
import sys

import yaml

from conserve.settings import load
from tests.checkout import ROOT

README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_settings_table_is_up_to_date() -> None:
    """`python -m scripts.settings_table` rewrites it."""
    command = [sys.executable, "-m", "scripts.settings_table", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_the_configuration_file_is_accepted() -> None:
    """As `serve run` and `serve deploy` would pass it on."""
    (text,) = _blocks("yaml")
    (application,) = yaml.safe_load(text)["applications"]
    settings = load(application["args"])
    assert settings.decoders.replicas == 3
    assert settings.engine == {"max_model_len": 32768}


def test_the_python_examples_parse() -> None:
    """They are meant to be copied."""
    examples = _blocks("python")
    assert examples
    for example in examples:
        ast.parse(example)


def test_every_command_of_make_exists() -> None:
    """A target that the README names is in the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
