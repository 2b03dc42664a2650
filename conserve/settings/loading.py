"""From what ``serve run`` or a config file gives to settings, or to what is wrong with it."""

import contextlib
import copy
import json
from typing import Any

from pydantic import ValidationError

from conserve.settings.application import Settings, SettingsError
from conserve.settings.expected import expected_of, line_of
from conserve.settings.files import read_file

_ROLES = ("prefillers", "decoders", "encoders")

# The papers' systems, by the settings that differ from the defaults; `docs/papers.md` says what of
# a paper these have. Given settings come before them.
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
    nested = _over(_nested(given), {} if path is None else _nested(read_file(path)))
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


def _over(given: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """Return what is given, and what a file has beside it."""
    both = file | given
    for name in file.keys() & given.keys():
        lower, upper = file[name], given[name]
        # A shorthand on either side is a part of the other's settings.
        if name in _ROLES and isinstance(lower, dict) != isinstance(upper, dict):
            lower, upper = _role(lower), _role(upper)
        if isinstance(lower, dict) and isinstance(upper, dict):
            both[name] = _over(upper, lower)
    return both


def _role(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"replicas": value}


def _nested(arguments: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name in sorted(arguments, key=lambda name: name.count(".")):
        *path, last = name.split(".")
        into, value = nested, arguments[name]
        for depth, part in enumerate(path):
            # A shorthand (decoders=3) beside a dotted name (decoders.num_cpus=2).
            if part in _ROLES and not isinstance(into.get(part, {}), dict):
                into[part] = _role(into[part])
            fields = into.get(part) or {}
            if not isinstance(fields, dict):
                group = ".".join(path[: depth + 1])
                raise SettingsError(f"{group}: {expected_of(group)}")
            into[part] = into = dict(fields)
        if isinstance(value, str) and ("engine" in path or value.startswith("[")):
            # From a command line; engine arguments have no declared type to convert to, and lists
            # are written as JSON.
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        into[last] = value
    return nested
