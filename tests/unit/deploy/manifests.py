"""Builds what `kubectl kustomize` builds, and finds what schemas refuse, without either program."""

import copy
import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from conserve_cli.launching import _ENDS_WITHIN_S

Json = dict[str, Any]
SCHEMAS = json.loads(lzma.decompress(Path(__file__).with_name("schemas.json.xz").read_bytes()))
# Beyond `drain_timeout_s`: for engines to leave, and then, as in `Launch.stop`, for Ray, for what is
# left of it, and for the command's own process.
DRAINED_WITHIN_S = _ENDS_WITHIN_S + 20 + 3 + 20 + 10
# Of a kustomization, in the order in which they take effect.
_FIELDS = ("resources", "configMapGenerator", "components", "patches", "namespace", "images")


def read(path: Path) -> list[Json]:
    # By way of JSON, since what YAML's aliases stand for would be one object.
    return [json.loads(json.dumps(one)) for one in yaml.safe_load_all(path.read_text())]


def build(folder: Path, objects: list[Json] | None = None) -> list[Json]:
    """Return the objects of a kustomization; a component's are `objects` too, changed."""
    found = objects or []
    (file,) = read(folder / "kustomization.yaml")
    assert file.keys() <= {"apiVersion", "kind", *_FIELDS}
    for name in file.get("resources", ()):
        found += (build if (folder / name).is_dir() else read)(folder / name)
    for made in file.get("configMapGenerator", ()):
        metadata = {"name": made["name"]} | {
            key: one for key, one in made.get("options", {}).items() if key == "labels"
        }
        data = {name: (folder / name).read_text() for name in made["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for name in file.get("components", ()):
        found = build(folder / name, found)
    for patch in file.get("patches", ()):
        steps = yaml.safe_load(patch.get("patch") or (folder / patch["path"]).read_text())
        assert patch["target"].keys() == {"kind", "name"}
        for one in found:
            if patch["target"] == {"kind": one["kind"], "name": one["metadata"]["name"]}:
                for step in steps:
                    _change(one, step)
    for one in found:
        if one["kind"] != "Namespace" and "namespace" in file:
            one["metadata"]["namespace"] = file["namespace"]
    for image in file.get("images", ()):
        for container in within(found, "image"):
            if container["image"].partition(":")[0] == image["name"]:
                name = image.get("newName", image["name"])
                container["image"] = f"{name}:{image['newTag']}"
    return found


def _change(document: Json, step: Json) -> None:
    """Take one step of a JSON patch (RFC 6902)."""
    value = _at(document, step["from"]) if step["op"] == "copy" else step["value"]
    path, _, key = step["path"].rpartition("/")
    parent = _at(document, path)
    if step["op"] == "replace":
        assert _at(document, step["path"]) is not None
    elif isinstance(parent, list):
        parent.insert(len(parent) if key == "-" else int(key), None)
        key = key.replace("-", str(len(parent) - 1))
    parent[_key(parent, key)] = copy.deepcopy(value)


def _at(document: Any, path: str) -> Any:
    for key in path.split("/")[1:]:
        document = document[_key(document, key)]
    return document


def _key(parent: Any, key: str) -> str | int:
    return int(key) if isinstance(parent, list) else key.replace("~1", "/")


def within(document: Any, key: str) -> Iterator[Json]:
    """Yield all objects in a document that have a field."""
    for one in document.values() if isinstance(document, dict) else document:
        if isinstance(one, dict | list):
            yield from within(one, key)
    if isinstance(document, dict) and key in document:
        yield document


@cache
def _validator(kind: str) -> Any:
    schema = {**SCHEMAS["kinds"][kind], "definitions": SCHEMAS["definitions"]}
    return jsonschema_rs.Draft7Validator(schema)


def refused(one: Json) -> list[str]:
    """Return what the schema of an object's kind refuses of it."""
    errors = _validator(f"{one['apiVersion']} {one['kind']}").iter_errors(one)
    return [f"{error.instance_path}: {error.message}" for error in errors]
