"""What the README shows of settings is what the code accepts."""

import ast
import json
import re
from pathlib import Path

import jsonschema
import yaml

from conserve.events import KINDS
from conserve.hints import NAMES
from conserve.identity import AGENT_HEADERS, PARENT_HEADERS, SOURCES
from conserve.settings import load
from scripts.reference import errors_made, wanted
from tests.checkout import ROOT

REFERENCE = ROOT / "docs/reference"
SETTINGS = REFERENCE / "settings.md"
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_reference_is_up_to_date() -> None:
    """`python -m scripts.reference` rewrites it."""
    assert [file.name for file, text in wanted().items() if file.read_text() != text] == []


def test_the_configuration_file_is_accepted() -> None:
    """As `serve run` and `serve deploy` would pass it on."""
    (text,) = _blocks("yaml")
    (application,) = yaml.safe_load(text)["applications"]
    settings = load(application["args"])
    assert settings.decoders.replicas == 3
    assert settings.engine == {"max_model_len": 32768}


def test_the_file_of_settings_is_accepted(tmp_path: Path) -> None:
    """By `--config`, and by an editor that has the schema."""
    (text,) = re.findall(r"```yaml\n(.*?)```", SETTINGS.read_text(), re.DOTALL)
    (tmp_path / "conserve.yaml").write_text(text)
    settings = load({"config": str(tmp_path / "conserve.yaml"), "decoders": "4"})
    assert (settings.decoders.replicas, settings.decoders.env) == (4, {"OMP_NUM_THREADS": "2"})
    schema = json.loads(SETTINGS.with_name("settings.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(yaml.safe_load(text))


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


def _rows(heading: str, page: str = "ids.md") -> list[list[str]]:
    """Cells of a table of docs/reference, without its head."""
    section = (REFERENCE / page).read_text().partition(f"{heading}\n")[2].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_name_of_an_id_is_in_the_docs_in_order() -> None:
    rows = _rows("## Ids")
    places = {False: "header", True: "body"}
    assert [(name, place) for name, place, *_ in rows] == [
        (source.name, places[source.in_body]) for source in SOURCES
    ]
    assert [last == "400" for *_, last in rows] == [source.strict for source in SOURCES]
    assert [row[0] for row in _rows("### Agents within a conversation")] == [*AGENT_HEADERS]
    assert [row[0] for row in _rows("### What began a conversation")] == [*PARENT_HEADERS]


def test_every_name_of_a_hint_is_in_the_docs_in_order() -> None:
    rows = _rows("## Hints")
    places = {False: "header", True: "body"}
    assert [(row[1], row[2]) for row in rows] == [
        (name.name, places[name.in_body]) for name in NAMES
    ]
    meanings = [row[0].partition("`")[0] for row in rows if row[0]]
    assert meanings == list(dict.fromkeys(name.meaning for name in NAMES))


def test_every_kind_of_event_is_in_the_docs() -> None:
    kinds = [kind for row in _rows("# Events", "events.md") for kind in re.findall(r"\w+", row[0])]
    assert sorted(kinds) == sorted(KINDS)


def test_every_error_is_in_the_docs_with_when_to_try_again() -> None:
    rows = _rows("## Codes", "errors.md")
    listed = {(row[0], row[1]): set(re.findall(r"\w+", row[2])) for row in rows}
    assert listed == errors_made()
    assert len(listed) == len(rows)
