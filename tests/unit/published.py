"""Values of types as OpenAI's package has them, which are made of its published schema.

Of each type there is a least value, and for every place in it the values that the schema allows
there in its stead: a field that may be left out, one that may be null, each word of an enumeration,
each kind of a union.
"""

import functools
from collections.abc import Iterator
from types import UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

# The package's own types are of this module, not of `typing`.
from typing_extensions import is_typeddict

_PLAIN: dict[Any, Any] = {str: "x", int: 1, float: 0.5, bool: True, object: {"a": 1}}


class Variant(NamedTuple):
    """A value that differs from the least in one place.

    Attributes:
        place: where, and by what.
        value: JSON.
        null: whether a field is null there that may be left out.
    """

    place: str
    value: Any
    null: bool = False


class Published:
    """The values of types.

    Args:
        needed: fields that the schema allows to be left out, and that least values have all the
            same, by the names of their types.
    """

    def __init__(self, needed: dict[str, set[str]] | None = None) -> None:
        self._needed = needed or {}

    def least(self, form: Any) -> Any:
        """The value of a type that has no more in it than it must."""
        origin, arguments = get_origin(form), get_args(form)
        if is_typeddict(form):
            needed = self._needed.get(form.__name__, ())
            return {
                name: self.least(hint)
                for name, hint, required in _fields(form)
                if required or name in needed
            }
        if origin is Literal:
            return arguments[0]
        if origin in (Required, Union, UnionType):
            return self.least(arguments[0])
        if origin is dict:
            return {"a": self.least(arguments[1])}
        return [self.least(arguments[0])] if arguments else _PLAIN[form]

    def variants(self, form: Any, place: str = "") -> Iterator[Variant]:
        """The values of a type, the least of it first."""
        yield Variant(place, self.least(form))
        yield from self._others(form, place)

    def _others(self, form: Any, place: str) -> Iterator[Variant]:
        origin, arguments = get_origin(form), get_args(form)
        if is_typeddict(form):
            yield from self._with_fields(form, place)
        elif origin is Required:
            yield from self._others(arguments[0], place)
        elif origin is Literal:
            yield from (Variant(f"{place}={word}", word) for word in arguments[1:])
        elif origin in (Union, UnionType):
            for position, kind in enumerate(arguments):
                if kind is type(None):
                    yield Variant(f"{place}=null", None)
                    continue
                where = f"{place}<{kind.__name__}>" if is_typeddict(kind) else place
                if position:
                    yield Variant(where, self.least(kind))
                yield from self._others(kind, where)
        elif arguments and origin is not dict:
            yield Variant(f"{place}=[]", [])
            for other in self._others(arguments[0], f"{place}[]"):
                yield other._replace(value=[other.value])

    def _with_fields(self, form: Any, place: str) -> Iterator[Variant]:
        whole = self.least(form)
        for name, hint, required in _fields(form):
            where = f"{place}.{name}"
            if not required:
                yield Variant(f"{where}=null", {**whole, name: None}, null=True)
                yield Variant(where, {**whole, name: self.least(hint)})
            for other in self._others(hint, where):
                yield other._replace(value={**whole, name: other.value})


@functools.cache
def _fields(form: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type, and whether it has to be there."""
    hints = get_type_hints(form, include_extras=True)
    return tuple((name, hint, get_origin(hint) is Required) for name, hint in hints.items())
