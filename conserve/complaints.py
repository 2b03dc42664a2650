"""Chooses the one validation error of a request's body that its client can act on.

Pydantic checks a field that may be of several kinds against each of them, and reports all errors:
that a user's message is no system message, say. It names places by Python's types.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Members by which a client says of which kind an object is.
_KINDS = ("role", "type")
_WANTED = {
    "string_type": "a string",
    **dict.fromkeys(("list_type", "iterable_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "dataclass_type": "an object",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "none_required": "null",
}
# Beginnings of the other messages, such as of a number that is too large.
_SHOULD = re.compile(r"^(?:Input|String|List|Dictionary|Value|Data) should ")
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|[^\s,]+(?=,| or |$)")
_VALUE_ERROR = "Value error, "
_AS_TEXT = re.compile(r"^(\S+)\n  (.*) \[type=(\w+), input_value=", re.MULTILINE)
_FIELD = re.compile(r"[a-z][a-z0-9_]*")
_TYPES = ("str", "int", "float", "bool", "bytes", "list", "dict", "tuple", "set", "none")


class Complaint(NamedTuple):
    """A sentence on the wrong field; the field is empty for the whole body."""

    field: str
    message: str


Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Error:
    """One of Pydantic's errors, with what the body was taken for on the way, and where."""

    place: Place
    kinds: tuple[tuple[Place, str], ...]
    type: str
    message: str
    expected: str

    @property
    def says_kind(self) -> bool:
        """Return whether it is about the member that says of which kind an object is."""
        literal_or_missing = self.type in ("literal_error", "missing", "enum")
        return literal_or_missing and bool(self.place) and self.place[-1] in _KINDS


def complaint(errors: Sequence[Mapping[str, Any]], body: Any) -> Complaint:
    """Choose one of a body's validation errors, as Pydantic's or FastAPI's ``errors()`` has them.

    Of the kinds that a field may be of, the one counts whose ``role`` or ``type`` the client wrote.
    Then it is the error about the innermost member, since all around that was right.
    """
    base, at = _base(errors[0], body)
    about = list(_of_the_right_kind([_located(error, base, at) for error in errors], 0))
    deepest = max(len(error.place) for error in about)
    first = min((error for error in about if len(error.place) == deepest), key=_rank)
    message = _merged(error for error in about if error.place == first.place)
    return Complaint(".".join(map(str, first.place)), message)


def complaint_in(text: str) -> Complaint | None:
    """Choose one of the errors in a text of Pydantic's; None if the text is none."""
    told = _AS_TEXT.findall(text) if "validation error" in text else ()
    errors = []
    for where, message, type_ in told:
        # Leave out names of types, and positions in a list whose field is not known.
        steps: Place = ()
        for step in where.split("."):
            if (_FIELD.fullmatch(step) and step not in _TYPES) or (steps and step.isdigit()):
                steps = (*steps, step)
        errors.append(_Error(steps, (), type_, message, message.partition(" be ")[2]))
    if not errors:
        return None
    first = min(errors, key=_rank)
    return Complaint(".".join(map(str, first.place)), _merged([first]))


def _rank(error: _Error) -> int:
    """Rank last what is missing for one kind and may be there for another."""
    return 1 if error.says_kind else 2 if error.type == "missing" else 0


def _location(error: Mapping[str, Any]) -> Sequence[str | int]:
    location: Sequence[str | int] = error["loc"]
    return location[1:] if location[:1] == ("body",) else location


def _base(error: Mapping[str, Any], body: Any) -> tuple[Place, Any]:
    """Return the part of a body that an error's place is relative to, and the place of that.

    vLLM 0.32 validates the parts of messages later, and by themselves.
    """
    for place, part in _parts(body):
        at, location = part, _location(error)
        for step in location:
            at, _ = _member(at, step)
        moved = at is not part or error["type"] == "missing" or not location
        if moved and (at is error["input"] or at == error["input"]):
            return place, part
    return (), body


def _parts(body: Any) -> Iterator[tuple[Place, Any]]:
    level: list[tuple[Place, Any]] = [((), body)]
    while level:
        yield from level
        inner: list[tuple[Place, Any]] = []
        for place, part in level:
            members = part.items() if isinstance(part, dict) else enumerate(part)
            inner += (
                ((*place, step), member)
                for step, member in members
                if isinstance(member, dict | list)
            )
        level = inner


def _located(error: Mapping[str, Any], place: Place, at: Any) -> _Error:
    kinds: list[tuple[Place, str]] = []
    location = _location(error)
    for number, step in enumerate(location, 1):
        at, there = _member(at, step)
        if there or (number == len(location) and error["type"] == "missing"):
            place = (*place, step)
        else:
            kinds.append((place, str(step)))
    expected = str(error.get("ctx", {}).get("expected", ""))
    return _Error(place, tuple(kinds), error["type"], error["msg"], expected)


def _member(of: Any, step: str | int) -> tuple[Any, bool]:
    if isinstance(of, dict) and step in of:
        return of[step], True
    if isinstance(of, list) and isinstance(step, int) and 0 <= step < len(of):
        return of[step], True
    return of, False


def _of_the_right_kind(errors: Sequence[_Error], level: int) -> Iterator[_Error]:
    """Leave out errors about kinds that a field is not of, from the outermost on."""
    points: dict[Place, dict[str, list[_Error]]] = {}
    for error in errors:
        if len(error.kinds) <= level:
            yield error
            continue
        place, kind = error.kinds[level]
        points.setdefault(place, {}).setdefault(kind, []).append(error)
    for place, kinds in points.items():
        of_other = {
            kind: [error for error in said if error.says_kind and error.place[:-1] == place]
            for kind, said in kinds.items()
        }
        # Kinds that a function validates all have one name.
        right = [kind for kind in kinds if not of_other[kind] or kind.startswith("function-")]
        for kind in right:
            yield from _of_the_right_kind(kinds[kind], level + 1)
        if not right:
            for said in of_other.values():
                yield from said


def _merged(errors: Iterable[_Error]) -> str:
    wanted: dict[str, None] = {}
    literals: dict[str, None] = {}
    said = ""
    for error in errors:
        if error.type in ("literal_error", "enum"):
            literals.update(dict.fromkeys(_LITERAL.findall(error.expected)))
        elif error.type in _WANTED:
            wanted[_WANTED[error.type]] = None
        elif error.type == "missing":
            said = said or "is required"
        else:
            said = said or _SHOULD.sub("must ", error.message.removeprefix(_VALUE_ERROR))
    choices = [*literals, *wanted]
    if not choices:
        return said
    *all_but_last, last = choices
    return f"must be {', '.join(all_but_last)}{' or ' * bool(all_but_last)}{last}"
