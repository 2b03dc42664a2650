"""From what ``serve run`` or a config file gives to settings, or to what is wrong with it."""

import contextlib
import copy
import itertools
import json
from typing import Any

from pydantic import BaseModel, ValidationError

from conserve.settings.application import Settings, SettingsError
from conserve.settings.removed import REMOVED

# The papers' systems, by the settings that differ from the defaults; `docs/papers.md` says what of
# a paper these have. Given settings come before them.
LIKE: dict[str, dict[str, Any]] = {
    "conserve_paper": {"placement": "conversation", "pausing": False},
    "thunderagent": {"prefillers": 0},
    "mars": {"prefillers": 0, "decoders": 1, "engine_scheduler": "conversation"},
    "agentserve": {
        "prefillers": 0,
        "decoders": 1,
        "engine_scheduler": "conversation_lane",
        "pausing": False,
    },
}


def load(arguments: dict[str, Any] | Settings | None) -> Settings:
    """Validate arguments as given by ``serve run`` or a config file.

    A dotted name sets a field of a field, so that a command line reaches all of them:
    ``decoders.num_cpus=2``, ``engine.max_model_len=8192``.

    Raises:
        SettingsError: one line a problem, each with the field's name.
    """
    if isinstance(arguments, Settings):
        return arguments
    nested = _like(copy.deepcopy(_nested(arguments or {})))
    problems = _take_removed(nested)
    try:
        settings = Settings.model_validate(nested)
        if not problems:
            return settings
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            field = ".".join(str(part) for part in item["loc"]) or "settings"
            if item["type"] == "extra_forbidden":
                problems.append(f"{field}: no such setting{_suggestion(item['loc'])}")
            else:
                problems.append(f"{field}: {item['msg']}")
    raise SettingsError("bad settings for ConServe\n  " + "\n  ".join(problems)) from None


def _like(nested: dict[str, Any]) -> dict[str, Any]:
    chosen = LIKE.get(str(nested.get("like")), {})
    for name, value in chosen.items():
        given = nested.setdefault(name, value)
        if isinstance(given, dict):
            given.setdefault("replicas", value)
    return nested


def _take_removed(nested: dict[str, Any]) -> list[str]:
    """Take settings of earlier versions out, and return what replaces each."""
    tiers = nested.get("tiers")
    names = {
        "ROLE": ("prefillers", "decoders"),
        "NAME": tuple(tiers) if isinstance(tiers, dict) else (),
    }
    problems = []
    for removed, instead in REMOVED.items():
        *path, last = removed.split(".")
        for whole in itertools.product(*(names.get(part, (part,)) for part in path)):
            group: Any = nested
            for part in whole:
                group = group.get(part) if isinstance(group, dict) else None
            if isinstance(group, dict) and last in group:
                del group[last]
                problems.append(f"`{'.'.join((*whole, last))}` was removed: {instead}")
    return problems


def _nested(arguments: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name in sorted(arguments, key=lambda name: name.count(".")):
        *path, last = name.split(".")
        into, value = nested, arguments[name]
        for part in path:
            # A shorthand (decoders=3) beside a dotted name (decoders.num_cpus=2).
            roles = ("prefillers", "decoders", "encoders")
            if part in roles and not isinstance(into.get(part, {}), dict):
                into[part] = {"replicas": into[part]}
            fields = into.get(part) or {}
            if not isinstance(fields, dict):
                raise SettingsError(f"bad settings for ConServe\n  {name}: {part} has no fields")
            into[part] = into = dict(fields)
        if isinstance(value, str) and ("engine" in path or value.startswith("[")):
            # From a command line; engine arguments have no declared type to convert to, and lists
            # are written as JSON.
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        into[last] = value
    return nested


def _suggestion(location: tuple[int | str, ...]) -> str:
    from difflib import get_close_matches

    model: type[BaseModel] = Settings
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation if isinstance(part, str) else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        model = annotation
    close = get_close_matches(str(location[-1]), model.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
