"""Knows the fields of turns' requests, so that none is ignored without a word."""

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conserve import hints, identity
from conserve.errors import ApiError

_TABLE: Any = tomllib.loads(Path(__file__).with_name("fields.toml").read_text())
_ELSEWHERE = _TABLE.pop("elsewhere").split()
# Fields that may hold ids or hints.
READ = {one.name.partition(".")[0] for one in (*identity.SOURCES, *hints.NAMES) if one.in_body}
KNOWN = {path: READ.union(fields["known"].split()) for path, fields in _TABLE.items()}
# Fields that ask for what is not served, and what to do instead. Null asks for nothing.
UNSERVED: dict[str, dict[str, str]] = {
    path: fields["unserved"]
    | {name: f"send {fields['form']}" for name in _ELSEWHERE if name not in KNOWN[path]}
    for path, fields in _TABLE.items()
}
_CLOSE = 0.88
# More are neither named nor compared, which takes 2 ms each.
_MOST_NAMES = 16
_MOST_CHARS = 64


def ignored(body: Mapping[str, Any], path: str) -> tuple[str, ...]:
    """Return the fields that have no effect, as a header can name them.

    Raises ApiError (400) for one that seems to be misspelt.
    """
    known = KNOWN[path] | UNSERVED[path].keys()
    given = [name for name in body if name not in known and body[name] is not None]
    unknown = [name[:_MOST_CHARS] for name in given[:_MOST_NAMES]]
    for name in unknown:
        meant = _nearest(name, path)
        # Beside the field itself it is something else, such as OpenRouter's `models`.
        if meant is not None and meant not in body:
            message = f"{name}: there is no such field; did you mean {meant}?"
            raise ApiError(400, message, "unknown_parameter", param=name)
    return tuple(re.sub(r"[^!-~]|,", "?", name) for name in unknown)


@functools.lru_cache(1024)
def _nearest(name: str, path: str) -> str | None:
    """Return the field of nearly that name, in snake case or camel case."""
    plain = {one.replace("_", ""): one for one in KNOWN[path] - UNSERVED[path].keys()}
    found = difflib.get_close_matches(re.sub("[_-]", "", name.lower()), plain, 1, _CLOSE)
    return plain[found[0]] if found else None
