"""The tools: Python functions with JSON schemas, and others that no task needs.

How an interface names things differs from one session to the next (`get_price(item=...)`,
`find_price(item_name=...)`), as interfaces do: a model has to read the schemas.
"""

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conserve_lab.agent.words import FIELDS, NUMBER

Value = int | str
Schema = dict[str, Any]

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "max": max,
    "min": min,
}
KIND_OF_FIELD = {name: kind for kind, fields in FIELDS.items() for name in fields}

_VERBS = ("get", "find", "read", "fetch")
_SUFFIXES = ("numbers", "values", "integers")
_OPERANDS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))
_KEYS = ("{kind}", "{kind}_name", "name", "target")

_DISTRACTOR_VERBS = [
    "send",
    "create",
    "delete",
    "list",
    "resize",
    "convert",
    "schedule",
    "export",
    "archive",
    "rename",
    "translate",
    "validate",
    "publish",
    "upload",
    "restart",
    "cancel",
    "compress",
    "rotate",
    "merge",
    "approve",
    "assign",
    "notify",
    "reserve",
    "refund",
]
_DISTRACTOR_OBJECTS = [
    "email",
    "report",
    "image",
    "invoice",
    "calendar",
    "ticket",
    "folder",
    "user",
    "message",
    "backup",
    "chart",
    "server",
    "booking",
    "contract",
    "database",
    "document",
    "payment",
    "playlist",
    "receipt",
    "room",
    "session",
    "shipment",
    "survey",
    "video",
]
_PARAMETERS = [
    "recipient",
    "subject",
    "format",
    "width",
    "height",
    "language",
    "start",
    "end",
    "limit",
    "offset",
    "priority",
    "channel",
    "region",
    "owner_id",
    "dry_run",
    "overwrite",
    "timeout",
    "comment",
    "tags",
    "version",
]
_TYPES = ("string", "integer", "boolean")
_WHAT = (
    "Works on one record at a time",
    "Returns the identifier of what was changed",
    "Needs write access to the account",
    "Runs in the background and returns at once",
    "Fails if the record is locked by another user",
    "Use it only when the user asked for it",
    "Large inputs are split into smaller parts",
    "Dates are given in the local time zone",
    "The change can be undone within a day",
    "Costs are charged to the current project",
    "Names are not case sensitive",
    "Repeated requests have no further effect",
)
_MEANING = (
    "what the call works on",
    "optional, the default is fine in most cases",
    "as shown in the list of records",
    "in the unit that the account is set to",
    "must not be empty",
    "counted from the start of the list",
    "one of the values that the account allows",
)


class ToolError(ValueError):
    """A call that the tools refuse: no such tool, wrong arguments, or nothing found."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Style:
    verb: str
    suffix: str
    operands: tuple[str, str]
    key: str

    @classmethod
    def draw(cls, rng: random.Random) -> "Style":
        return cls(*map(rng.choice, (_VERBS, _SUFFIXES, _OPERANDS, _KEYS)))  # type: ignore[arg-type]

    def lookup(self, name: str, subject: str) -> Call:
        key = self.key.format(kind=KIND_OF_FIELD[name])
        return Call(f"{self.verb}_{name}", {key: subject})

    def operation(self, name: str, first: int, second: int) -> Call:
        operands: dict[str, Value] = dict(zip(self.operands, (first, second), strict=True))
        return Call(f"{name}_{self.suffix}", operands)


@dataclass(slots=True)
class Toolbox:
    """Tables that the tools of one session work on, one for each field, by name."""

    style: Style
    tables: dict[str, dict[str, Value]] = field(default_factory=dict)

    def run(self, call: Call) -> Value:
        """Carry out a call; ToolError: the call is wrong; the message is what the model is told."""
        for name in KIND_OF_FIELD:
            expected = self.style.lookup(name, "")
            if call.name == expected.name:
                (key,) = expected.arguments
                return self._look_up(name, _strings(call, key)[0])
        for name, function in OPERATIONS.items():
            if call.name == self.style.operation(name, 0, 0).name:
                return function(*_integers(call, *self.style.operands))
        raise ToolError(f"there is no tool {call.name}")

    def _look_up(self, name: str, subject: str) -> Value:
        try:
            return self.tables[name][subject]
        except KeyError:
            raise ToolError(f"no {name} is known of {subject}") from None

    def lookup_schema(self, rng: random.Random, name: str) -> Schema:
        kind = KIND_OF_FIELD[name]
        call = self.style.lookup(name, "")
        result = "a number" if FIELDS[kind][name] == NUMBER else "a name"
        description = f"Look up the {name} of one {kind}, which is {result}."
        return _schema(
            call.name,
            _sentences(rng, description, rng.randrange(2)),
            dict.fromkeys(call.arguments, ("string", f"name of the {kind}")),
        )

    def operation_schema(self, rng: random.Random, name: str) -> Schema:
        call = self.style.operation(name, 0, 0)
        description = f"Calculate with two numbers: {name}."
        first, second = call.arguments
        return _schema(
            call.name,
            _sentences(rng, description, rng.randrange(2)),
            {first: ("integer", "first number"), second: ("integer", "second number")},
        )


def distractor_schema(rng: random.Random) -> Schema:
    """The schema of a tool that exists on paper only: no task needs it."""
    verb, thing = rng.choice(_DISTRACTOR_VERBS), rng.choice(_DISTRACTOR_OBJECTS)
    names = rng.sample(_PARAMETERS, rng.randint(1, 4))
    return _schema(
        f"{verb}_{thing}",
        _sentences(rng, f"{verb.capitalize()} one {thing}.", rng.randint(0, 3)),
        {name: (rng.choice(_TYPES), rng.choice(_MEANING)) for name in names},
    )


def _sentences(rng: random.Random, first: str, more: int) -> str:
    return " ".join([first, *(f"{sentence}." for sentence in rng.sample(_WHAT, more))])


def _schema(name: str, description: str, parameters: Mapping[str, tuple[str, str]]) -> Schema:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kind, "description": meaning}
                    for key, (kind, meaning) in parameters.items()
                },
                "required": list(parameters),
            },
        },
    }


def _strings(call: Call, *keys: str) -> list[str]:
    values = _arguments(call, keys)
    if not all(isinstance(value, str) for value in values):
        raise ToolError(f"{call.name} takes a string")
    return [str(value) for value in values]


def _integers(call: Call, *keys: str) -> list[int]:
    values = _arguments(call, keys)
    if not all(type(value) is int for value in values):
        raise ToolError(f"{call.name} takes integers")
    return [int(value) for value in values]


def _arguments(call: Call, keys: tuple[str, ...]) -> list[Value]:
    if set(call.arguments) != set(keys):
        raise ToolError(f"{call.name} takes {', '.join(keys)}, not {', '.join(call.arguments)}")
    return [call.arguments[key] for key in keys]
