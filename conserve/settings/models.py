"""The settings of several models behind one door: each one's own, over those that are common."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

if TYPE_CHECKING:
    from conserve.settings.application import Settings

ROLES = ("prefillers", "decoders", "encoders")
# What each of several models may have for itself. All else is the application's.
OWN = (
    "model", "aliases", "adapters", "adapters_file", "gpus", *ROLES, "engine", "profile",
    "autoscaling", "placement", "engine_scheduler", "tpot_bound_s", "pausing", "volatile_text",
    "special_tokens_in_text",
)  # fmt: skip
# What only one model can have.
_ALONE = ("model", "served_model_name", "aliases", "adapters", "adapters_file", "gpus")
_OF_ALL = {"models", "default_model", "share_gpus"}
# A hub's names have a slash; a URL has the name, and so have logs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


def over(given: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """Return what is given, and what is below it and not given."""
    both = below | given
    for name in below.keys() & given.keys():
        lower, upper = below[name], given[name]
        # A shorthand on either side is a part of the other's settings.
        if name in ROLES and isinstance(lower, dict) != isinstance(upper, dict):
            lower, upper = of_role(lower), of_role(upper)
        if isinstance(lower, dict) and isinstance(upper, dict):
            both[name] = over(upper, lower)
    return both


def of_role(value: Any) -> dict[str, Any]:
    """Return a role's settings, for which a number of engines may stand."""
    return value if isinstance(value, dict) else {"replicas": value}


def slug_of(name: str) -> str:
    """Return a model's name as names of deployments and of files may have it."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", name)


def own_line(name: str, line: str) -> str:
    """Return a problem's line with a model's name, unless its setting is one that all have."""
    own = re.split(r"[.:]", line, maxsplit=1)[0] in OWN
    return f"models.{name}.{line}" if own else line


def each_of(whole: "Settings") -> dict[str, "Settings"]:
    """Return the settings of each model of ``whole``, by its name.

    Raises:
        ValueError: a line for each problem, each with its setting's name.
    """
    from conserve.settings.expected import line_of

    problems = [
        f"{name}: with models, it is a model's own; set models.NAME.{name}"
        for name in _ALONE
        if name in whole.model_fields_set
    ]
    common = whole.model_dump(exclude_unset=True, exclude=_OF_ALL)
    found: dict[str, Settings] = {}
    for name, own in whole.models.items():
        if not _NAME.fullmatch(name):
            problems.append(f"models.{name[:40]}: name models by letters, digits and . _ : / @ + -")
        if strange := own.keys() - set(OWN):
            one = min(strange)
            shared = one in type(whole).model_fields
            said = "all models have it in common" if shared else "no such setting of a model"
            problems.append(f"models.{name}.{one}: {said}; a model may have {', '.join(OWN)}")
            continue
        try:
            mine = over({"model": name, **own, "served_model_name": name}, common)
            found[name] = type(whole).model_validate(mine)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            lines = [line for item in errors for line in line_of(item).split("\n")]
            # What is wrong with what all have is said once, by its own name.
            problems += [own_line(name, line) for line in lines]
    problems += [*_names_meet(found), *_same_deployment(found)]
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    of_all = {"models": whole.models, "share_gpus": whole.share_gpus}
    return {name: own.model_copy(update=of_all) for name, own in found.items()}


def _names_meet(each: dict[str, "Settings"]) -> Iterator[str]:
    owners = {name: name for name in each}
    for name, own in each.items():
        named = [("aliases", alias) for alias in own.aliases]
        named += [("adapters", adapter) for adapter in own.adapters]
        named += [("adapters_file", own.adapters_file)] if own.adapters_file else []
        for setting, one in named:
            other = owners.setdefault(one, name)
            if other != name:
                yield f"models.{name}.{setting}: {one!r} belongs to {other!r} already; drop one"


def _same_deployment(each: dict[str, "Settings"]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name in each:
        if (other := seen.setdefault(slug_of(name), name)) != name:
            yield f"models.{name}: told from {other!r} by punctuation alone; name one otherwise"
