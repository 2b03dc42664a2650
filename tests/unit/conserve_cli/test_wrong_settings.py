"""Each wrong setting, as an argument or in a file, is one line with its name and what is right."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from conserve.settings import RoleSettings, Settings, TierSettings, load
from conserve.settings.expected import schema
from conserve_cli.main import cli

# Values that are wrong for a kind of setting: as arguments, and in a file.
_ARGUMENTS: dict[Any, list[str]] = {
    int: ["", "three", "1.5", "nan", "[1]", "1e400"],
    float: ["", "three", "nan", "inf", "1e400", "[1]", "-inf"],
    bool: ["", "maybe", "2", "[true]"],
    Literal: ["", "no-such", "[1]"],
    str: ["[1]"],
    list: ["", "a.example", "[", "[1]", "{}"],
    dict: ["", "x", "5", "[1]"],
    BaseModel: ["", "x", "5", "[1]"],
    RoleSettings: ["", "three", "-1", "1.5", "[1]"],
}
_IN_A_FILE: dict[Any, list[Any]] = {
    int: ["three", [], {}, [1], {"a": 1}, True],
    float: ["three", [], {}, [1], {"a": 1}, True],
    bool: ["maybe", 5, [], {}],
    Literal: ["no-such", 5, [], {}],
    str: [5, 1.5, True, [], {}],
    list: ["x", 5, {}, [5], [[]]],
    dict: ["x", 5, [], [1]],
    BaseModel: ["x", 5, [], [1]],
    RoleSettings: ["three", 2.5, [], True, [1]],
}
# What pydantic would say, of which a user learns nothing.
_INTERNAL = re.compile(r"Input should|Value error|instance of|valid (integer|string|dict)|Settings")


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting and group, by its whole name, with pydantic's description."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        kind, _ = _kind(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
    if model is Settings:
        yield from _fields(TierSettings, "tiers.some.")


def _kind(annotation: Any) -> tuple[Any, bool]:
    """Return a setting's declared type, and whether it may be null."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        kinds = [one for one in get_args(annotation) if one is not NoneType]
        # A number or text: the power cap.
        return (_kind(kinds[0])[0], True)
    return origin or annotation, False


FIELDS = dict(_fields(Settings))
EDITOR = jsonschema.Draft7Validator(schema())


def _beyond(field: Any) -> list[Any]:
    """Values just outside a setting's range, or of another form."""
    found: list[Any] = []
    for bound in field.metadata:
        if getattr(bound, "ge", None) is not None:
            found.append(bound.ge - 1)
        if getattr(bound, "gt", None) is not None:
            found.append(bound.gt)
        if getattr(bound, "le", None) is not None:
            found.append(bound.le + 1)
        if getattr(bound, "min_length", None):
            found.append("")
        if getattr(bound, "pattern", None):
            found += ["a b", "ä", "x" * 65]
    return found


def _nested(name: str, value: Any) -> Any:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def _refused(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["serve", *arguments])
    assert done.exit_code == 2, (arguments, done.output, done.exception)
    assert done.stdout == "", arguments
    (line,) = done.stderr.splitlines()
    assert _INTERNAL.search(line) is None, line
    return line


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("it was taken for good")

    monkeypatch.setattr("conserve_cli.serve.laid_out", refuse)


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_value_is_one_line_with_what_would_be_right(name: str, tmp_path: Path) -> None:
    field = FIELDS[name]
    kind, optional = _kind(field.annotation)
    key = kind if kind in _ARGUMENTS else BaseModel
    beyond = _beyond(field)
    as_arguments = _ARGUMENTS[key] + [str(value) for value in beyond]
    in_a_file = _IN_A_FILE[key] + beyond + ([] if optional else [None])
    lines = [_refused(f"{name}={value}") for value in as_arguments]
    file = tmp_path / "settings.yaml"
    for value in in_a_file:
        file.write_text(yaml.safe_dump(_nested(name, value)))
        lines.append(_refused("--config", str(file)))
        # An editor that has the schema says so, too.
        assert not EDITOR.is_valid(_nested(name, value)), value
    for line in lines:
        assert re.match(rf"{re.escape(name)}: give \S+", line), line


@pytest.mark.parametrize("name", FIELDS)
def test_a_name_that_is_none_is_one_line_with_the_one_that_is(name: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    meant = f"{name}x: no such setting; did you mean {name}?"
    assert _refused(f"{name}x=1") == meant
    wrong = _nested(f"{name}x", 1)
    for content in (wrong, {f"{name}x": 1}):
        file.write_text(json.dumps(content))
        assert _refused("--config", str(file)) == meant
    assert not EDITOR.is_valid(wrong)


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (
            "decoders=three",
            "decoders: give a number of engines, from 0 to 1024, or its settings, such as "
            "decoders.replicas=3",
        ),
        ("decoders.env.A-B=1", "decoders.env.A-B: name variables by letters, digits and _"),
        ("replicas=2", "replicas: no such setting; did you mean decoders.replicas?"),
        (
            "tensor_parallel_size=2",
            "tensor_parallel_size: no such setting; did you mean engine.tensor_parallel_size?",
        ),
        (
            "zzz=1",
            "zzz: no such setting; docs/reference/settings.md has all; vLLM's engine arguments are "
            "given as engine.NAME",
        ),
        ("engine.model=x", "engine.model cannot be set: use `model`"),
        ("decoders", "'decoders' is not a setting; write name=value."),
        ("config=/no/such.yaml", "config: /no/such.yaml cannot be read: No such file or directory"),
    ],
)
def test_what_some_are_told(argument: str, line: str) -> None:
    assert _refused(argument).startswith(line)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "port: [8000", "line 1, column 12: not YAML: expected ',' or ']'"),
        ("a.json", '{"port": 1, "port": 2}', "port is there twice; leave one out"),
        ("a.yaml", "engine: &a\n  x: *a\n", "not YAML: found unconstructable recursive node"),
        ("a.json", '{"a":' * 100_000, "is nested too deeply"),
        ("a.yaml", "applications: []", "is a file for Ray Serve; start it by `serve run "),
        ("a.yaml", "#" * (1 << 20) + "\n", "is over 1 MiB, which no file of settings is"),
    ],
)
def test_a_file_that_cannot_be_one(name: str, content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content)
    line = _refused("--config", str(file))
    assert line.startswith(f"config: {file}")
    assert said in line


def test_several_problems_are_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("decoders: three\nprefilers: 2\n")
    done = CliRunner().invoke(cli, ["serve", "--config", str(file), "port=x"])
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        *("decoders", "port", "prefilers"),
    ]


def test_arguments_go_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "decoders: {replicas: 2, num_cpus: 2, env: {A: '1'}}\nprefillers: 2\nport: 9000\n"
        "engine.seed: 1\nengine: {dtype: auto, revision: 2026-01-01}\nallowed_hosts: [a, b]\n"
    )
    over = {"decoders": "3", "decoders.env.B": "2", "prefillers.num_cpus": "4", "engine.seed": "7"}
    settings = load({"config": str(file), **over, "allowed_hosts": '["c"]'})
    assert (settings.decoders.replicas, settings.decoders.num_cpus) == (3, 2)
    assert settings.decoders.env == {"A": "1", "B": "2"}
    assert (settings.prefillers.replicas, settings.prefillers.num_cpus) == (2, 4)
    assert settings.engine == {"dtype": "auto", "revision": "2026-01-01", "seed": 7}
    assert (settings.port, settings.allowed_hosts) == (9000, ["c"])


def test_a_json_file_is_the_same(tmp_path: Path) -> None:
    content = {"$schema": "settings.schema.json", "decoders": {"replicas": 4}, "port": 9000}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(content))
    assert load({"config": str(file)}) == load({"decoders": 4, "port": 9000})
    EDITOR.validate(content)


def test_every_default_is_right_by_the_schema() -> None:
    EDITOR.validate(json.loads(Settings().model_dump_json()))
    EDITOR.validate({"decoders": 3, "decoders.num_cpus": 2, "engine.seed": 1})
    jsonschema.Draft7Validator.check_schema(schema())


@pytest.mark.parametrize("command", ["serve", "demo", "doctor"])
def test_nothing_heavy_is_loaded_for_a_refusal(command: str) -> None:
    script = (
        "import sys\nfrom conserve_cli.main import cli\ntry:\n    cli(sys.argv[1:])\nfinally:\n"
        "    print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, command, "decoders=three"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not {"ray", "vllm", "torch", "lmcache"} & set(done.stdout.split())


def test_a_file_reaches_the_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve run` reads it itself, so that no secret of it is in a process's arguments."""
    given: list[Any] = []

    def launched(settings: Settings, arguments: list[str], log: object) -> Any:
        given.extend((settings, load(dict(one.split("=", 1) for one in arguments))))
        raise SystemExit(7)

    monkeypatch.setattr("conserve_cli.serve.laid_out", lambda settings: settings)
    monkeypatch.setattr("conserve_cli.serve.launched", launched)
    monkeypatch.chdir(tmp_path)
    # As editors on Windows write it.
    Path("mine.json").write_text('{"decoders": {"env": {"TOKEN": "secret"}}}', "utf-8-sig")
    done = CliRunner().invoke(cli, ["serve", "--config", "mine.json", "port=9000"])
    assert done.exit_code == 7, done.output
    assert given[0] == given[1] == load({"decoders.env.TOKEN": "secret", "port": 9000})
