"""Compares the router's own answers with their schemas in `/openapi.json`."""

import copy
import re
from typing import Any

import jsonschema

from conserve.apis import is_anthropic
from deployments import answers
from deployments.router.interface import COMPONENTS, PATHS, SCHEMAS

# Of these the document says only a part.
ENGINES_ANSWERS = {kind.__name__ for kind in answers.EngineAnswer.__subclasses__()}


def _strict() -> dict[str, Any]:
    schemas = copy.deepcopy(SCHEMAS)
    for name, schema in schemas.items():
        # An event has more fields, by its kind.
        if name != answers.Event.__name__ and "properties" in schema:
            schema["additionalProperties"] = False
    return schemas


_STRICT = _strict()


def template_of(path: str) -> str | None:
    """Return the path in the document that a request's path is an instance of."""
    found = (one for one in PATHS if re.fullmatch(re.sub(r"\{\w+\}", ".+", one), path))
    return max(found, key=len, default=None)


def own_operations() -> set[tuple[str, str]]:
    """Return methods and paths that ConServe itself answers in JSON."""
    return {
        (method.upper(), path)
        for path, operations in PATHS.items()
        for method, operation in operations.items()
        if (content := operation["responses"]["200"]["content"].get("application/json"))
        and content["schema"].get("$ref", "").rpartition("/")[2] not in ENGINES_ANSWERS
        and path != "/openapi.json"
    }


def check(method: str, path: str, status: int, body: Any) -> None:
    """Fail if an answer is not exactly as described: a field less, or a field more."""
    template = template_of(path)
    operation = {} if template is None else PATHS[template].get(method.lower(), {})
    if status == 200 and (method, template) not in own_operations():
        return
    described = operation.get("responses", {}).get(str(status))
    if described is None:
        assert status in (404, 405, 415), f"{method} {path} says nothing of {status}"
        name = "anthropic-404" if is_anthropic(path) else "404"
        described = COMPONENTS["responses"][name]
    if "$ref" in described:
        described = COMPONENTS["responses"][described["$ref"].rpartition("/")[2]]
    schema = described["content"]["application/json"]["schema"]
    jsonschema.validate(body, {**schema, "components": {"schemas": _STRICT}})
