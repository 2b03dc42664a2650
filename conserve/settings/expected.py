"""Says which setting an error is about, and what would be right there.

Both come from the settings' JSON Schema, by which editors complete and check a file, too.
"""

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from conserve.settings.application import Settings
from conserve.settings.engine_arguments import KNOWN_ARGUMENTS
from conserve.settings.groups import NAME, VARIABLE

# A node of a JSON Schema.
Node = dict[str, Any]

_IN_WORDS = {
    NAME: "give up to 64 letters, digits, and . _ -",
    VARIABLE: "name variables by letters, digits and _",
}


def schema() -> Node:
    """Return the JSON Schema of a file of settings, for editors."""
    said = {"type": "string", "description": "Where this schema is, for editors."}
    # A file may have dotted names, too, as a command line.
    fields = _inner(_root()).items()
    groups = [name for name, node in fields if "object" in _resolved(node).get("type", ())]
    return {
        # The newest that all editors know; it is enough.
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_root(),
        "title": "Settings of ConServe",
        "properties": {"$schema": said, **_root()["properties"]},
        "patternProperties": {rf"^({'|'.join(groups)})\.": {}},
    }


@functools.cache
def _root() -> Node:
    found: Node = Settings.model_json_schema()
    _drop_titles(found)
    return found


def settings() -> Iterator[str]:
    """Yield the dotted name of every setting and group, with NAME for a tier's name."""
    yield from _names(_root(), "")


def line_of(error: ErrorDetails) -> str:
    """Return an error of pydantic's as a line: the setting's name, and what would be right."""
    location = error["loc"]
    if error["type"] == "extra_forbidden":
        return f"{'.'.join(map(str, location))}: no such setting; {_instead(location)}"
    name, node, rest = _found(location)
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        # Those of several settings together, or of a part of one, name it themselves.
        return said if not name or said.startswith(f"{name}.") else f"{name}: {said}"
    if rest[1:] == ("[key]",) or error["type"] == "invalid_key":
        pattern = next(iter(node.get("patternProperties", ())), "")
        right = _IN_WORDS.get(pattern, "names are text; put it in quotes")
        return f"{'.'.join(filter(None, (name, str((rest or location)[0]))))}: {right}"
    return f"{name}: {expected(node, name)}"


def expected(node: Node, name: str) -> str:
    """Return what would be right for a setting, as a request."""
    node = _resolved(node)
    kind = node.get("type")
    if "anyOf" in node:
        kinds = [one for one in node["anyOf"] if one.keys() & {"type", "enum", "$ref"}]
        each = [expected(one, name) for one in kinds if one.get("type") != "null"]
        return ", or ".join([each[0], *(one.removeprefix("give ") for one in each[1:])])
    if "enum" in node:
        return f"give {_listed(node['enum'], 'or')}"
    if isinstance(kind, list):
        return (
            f"give a number of engines, {_range(node)}, or its settings, such as {name}.replicas=3"
        )
    if kind == "boolean":
        return "give true or false"
    if kind in ("integer", "number"):
        return f"give a {'whole number' if kind == 'integer' else 'number'} {_range(node)}".strip()
    if kind == "array":
        of = node.get("items", {})
        items = of.get("enum", ["a.example"])
        said = f" of {_listed(items, 'or')}" if "enum" in of else ""
        return f'give a list{said}, such as ["{items[0]}"]'
    if kind == "object":
        inner = next(_names(node, f"{name}."), f"{name}.NAME")
        default = _inner(node).get(inner.removeprefix(f"{name}."), {}).get("default")
        shown = "VALUE" if default is None else str(default).lower()
        return f"give names and values, such as {inner}={shown}"
    return _IN_WORDS.get(node.get("pattern", ""), "give text; in a file, put numbers in quotes")


def expected_of(name: str) -> str:
    """Return what would be right for the setting of this name."""
    return expected(_found(name.split("."))[1], name)


def _instead(location: Sequence[int | str]) -> str:
    """Return what may have been meant by a name that is no setting."""
    group = ".".join(map(str, location[:-1]))
    last = str(location[-1])
    _, node, _ = _found(location[:-1])
    if not group:
        # One that is given without its group; of those in several, decoders have the most use.
        whole = [name for name in settings() if name.rpartition(".")[2] == last]
        if last in KNOWN_ARGUMENTS:
            whole.append(f"engine.{last}")
        if whole:
            return f"did you mean {next((one for one in whole if 'decoders' in one), whole[0])}?"
    near = difflib.get_close_matches(last, _inner(node), n=1)
    if near:
        return f"did you mean {group}{'.' if group else ''}{near[0]}?"
    if group:
        return f"{group} has {_listed(list(_inner(node)), 'and')}"
    return "docs/reference/settings.md has all; vLLM's engine arguments are given as engine.NAME"


# --- The schema -----------------------------------------------------------------------------------


def _resolved(node: Node) -> Node:
    if "$ref" not in node:
        return node
    group: Node = _root()["$defs"][node["$ref"].rpartition("/")[2]]
    return group


def _inner(node: Node) -> dict[str, Node]:
    """Return what a group has by name; nothing of what is no group."""
    found: dict[str, Node] = _resolved(node).get("properties", {})
    return found


def _free(node: Node) -> Node | None:
    """Return what every name of a mapping has; None: it is none, or has names of its own."""
    node = _resolved(node)
    named = next(iter(node.get("patternProperties", {}).values()), None)
    free = node.get("additionalProperties") if named is None else named
    return {} if free is True else free if isinstance(free, dict) else None


def _found(location: Sequence[int | str]) -> tuple[str, Node, tuple[int | str, ...]]:
    """Return the setting's name and node, and the rest of the location, within its value."""
    node = _root()
    names: list[str] = []
    for index, part in enumerate(location):
        free = _free(node)
        if str(part) in _inner(node):
            node = _inner(node)[str(part)]
        elif free is not None and location[index + 1 :] != ("[key]",):
            node = free
        else:
            return ".".join(names), _resolved(node), tuple(location[index:])
        names.append(str(part))
    return ".".join(names), _resolved(node), ()


def _names(group: Node, prefix: str) -> Iterator[str]:
    for name, node in _inner(group).items():
        yield prefix + name
        yield from _names(node, f"{prefix}{name}.")
    free = _free(group)
    if free:
        yield from _names(free, f"{prefix}NAME.")


def _drop_titles(node: Any) -> None:
    """Take out the names that pydantic makes of fields' names, and which editors would show."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for part in node.values():
            _drop_titles(part)
    elif isinstance(node, list):
        for part in node:
            _drop_titles(part)


# --- Words ----------------------------------------------------------------------------------------


def _range(node: Node) -> str:
    above, least, most = (node.get(key) for key in ("exclusiveMinimum", "minimum", "maximum"))
    if least is not None:
        return f"from {least:g} to {most:.10g}" if most is not None else f"from {least:.10g} on"
    if above is None:
        return ""
    return f"above {above:g}" + ("" if most is None else f", and at most {most:.10g}")


def _listed(choices: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
