"""From what ``serve run`` or a config file gives to settings, or to what is wrong with it."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conserve.settings.application import Settings, SettingsError
from conserve.settings.expected import expected_of, line_of
from conserve.settings.models import ROLES, of_role, over

# A file of settings has a page; this bounds what a wrong path could load.
_LONGEST_BYTES = 1 << 20

# The papers' systems, by the settings that differ from the defaults; `docs/how/papers.md` says what
# of a paper these have. Given settings come before them.
LIKE: dict[str, dict[str, Any]] = {
    "conserve_paper": {"placement": "conversation", "pausing": False},
    "thunderagent": {"prefillers": 0},
    "mars": {"prefillers": 0, "decoders": 1, "engine_scheduler": "order+retention"},
    "agentserve": {
        "prefillers": 0,
        "decoders": 1,
        "engine_scheduler": "chunks+lane",
        "pausing": False,
    },
    "nova": {"prefillers": 0, "decoders": 1, "engine_scheduler": "lane", "pausing": False},
}


def load(arguments: dict[str, Any] | Settings | None) -> Settings:
    """Validate arguments as given by ``serve run`` or a config file.

    A dotted name sets a field of a field, so that a command line reaches all of them:
    ``decoders.num_cpus=2``, ``engine.max_model_len=8192``. The argument ``config`` names a file of
    settings, over which the other arguments go.

    Raises:
        SettingsError: one line a problem, each with the setting's name.
    """
    if isinstance(arguments, Settings):
        return arguments
    given = copy.deepcopy(arguments or {})
    path = given.pop("config", None)
    nested = over(_nested(given), {} if path is None else _nested(read_file(path)))
    for name, value in LIKE.get(str(nested.get("like")), {}).items():
        own = nested.setdefault(name, value)
        if isinstance(own, dict):
            own.setdefault("replicas", value)
    try:
        return Settings.model_validate(nested)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        problems = [line for item in errors for line in line_of(item).split("\n")]
        # A value that is none of several types has an error for each.
        raise SettingsError(*dict.fromkeys(problems)) from None


def _nested(arguments: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name in sorted(arguments, key=lambda name: name.count(".")):
        *path, last = name.split(".")
        into, value = nested, arguments[name]
        for depth, part in enumerate(path):
            # A shorthand (decoders=3) beside a dotted name (decoders.num_cpus=2).
            if part in ROLES and not isinstance(into.get(part, {}), dict):
                into[part] = of_role(into[part])
            fields = into.get(part) or {}
            if not isinstance(fields, dict):
                group = ".".join(path[: depth + 1])
                raise SettingsError(f"{group}: {expected_of(group)}")
            into[part] = into = dict(fields)
        if isinstance(value, str) and ("engine" in path or value.startswith(("[", "{"))):
            # From a command line; engine arguments have no declared type to convert to, and lists
            # and mappings are written as JSON.
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        into[last] = value
    return nested


# --- files ----------------------------------------------------------------------------------------


def read_file(given: Any) -> dict[str, Any]:
    """Return what a file of settings has, by the names in it.

    Args:
        given: its path, as a user wrote it.

    Raises:
        SettingsError: it cannot be read; says why, and repeats no value of it.
    """
    if not isinstance(given, str) or not given:
        raise SettingsError("config: give the path of a file of settings")
    path = Path(given).expanduser()
    try:
        with path.open("rb") as file:
            raw = file.read(_LONGEST_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"config: {path} cannot be read: {error.strerror}") from None
    if len(raw) > _LONGEST_BYTES:
        raise SettingsError(f"config: {path} is over 1 MiB, which no file of settings is")
    try:
        # Editors on Windows put a byte-order mark first.
        text = raw.decode("utf-8-sig")
        found = _json(text) if path.suffix == ".json" else _yaml(text)
    except UnicodeDecodeError:
        raise SettingsError(f"config: {path} is not text in UTF-8") from None
    except RecursionError:
        raise SettingsError(f"config: {path} is nested too deeply") from None
    except ValueError as error:
        raise SettingsError(f"config: {path}: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"config: {path}: write a setting a line, such as port: 8000")
    found.pop("$schema", None)
    if "applications" in found:
        raise SettingsError(
            f"config: {path} is a file for Ray Serve; start it by `serve run {path}`, or give a "
            "file with what is under its args"
        )
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place}: not JSON: {error.msg}") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice; leave one out")
        found[name] = value
    return found


def _yaml(text: str) -> Any:
    # This import takes a while, and most starts have no file.
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc] # yaml has no types
        """Refuses names that are no text, or are there twice, and a value within itself."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            names = []
            for name, _ in node.value:
                if name.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                    line = name.start_mark.line + 1
                    raise ValueError(f"line {line}: names are text; put this one in quotes")
                names.append((name.value, None))
            _without_twins(names)
            return super().construct_mapping(node, deep=True)

    # A version such as 2026-01-01 stays text, as on a command line.
    Loader.yaml_implicit_resolvers = {
        first: [one for one in found if one[0] != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {str(error).splitlines()[0]}") from None
