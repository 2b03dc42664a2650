"""Python functions as tools of OpenAI's API."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; ``schema`` goes into a request's ``tools``."""

    name: str
    schema: Json
    function: Callable[..., Any]
    arguments: TypeAdapter[Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Make a tool of a function, from its annotations and docstring."""
        name = function.__name__
        fields: dict[str, Any] = {}
        for one in inspect.signature(function, eval_str=True).parameters.values():
            if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                raise TypeError(f"{name}: a tool's parameters need names; replace {one}")
            annotation = Any if one.annotation is one.empty else one.annotation
            fields[one.name] = (annotation, ... if one.default is one.empty else one.default)
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        function_schema = {
            "name": name,
            "description": inspect.getdoc(function) or "",
            "parameters": model.model_json_schema(),
        }
        return cls(
            name, {"type": "function", "function": function_schema}, function, TypeAdapter(model)
        )

    def call(self, arguments: str) -> str:
        """Call the function, and return its result, or what was wrong, to tell the model."""
        try:
            parsed = self.arguments.validate_json(arguments or "{}")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            return f"error: {where}: {first['msg']}" if where else f"error: {first['msg']}"
        given = {name: getattr(parsed, name) for name in type(parsed).model_fields}
        try:
            result = self.function(**given)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)
