"""Serves `/openapi.json`: `interface`, and vLLM's own schemas of the bodies that engines get."""

import copy
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from conserve.apis import COUNT_INPUT, RESPONSES, TOKEN_PATHS, TURN_PATHS
from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.router import interface, parameters
from deployments.router.tokens import by_leisure
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table.table_client import TableClient

_SCHEMAS = "#/components/schemas/"


class Description:
    """Serves the document, for which an engine is asked once."""

    def __init__(self, settings: Settings, table: TableClient, upstream: Upstream) -> None:
        self._settings = settings
        self._table = table
        self._upstream = upstream
        self._document: dict[str, Any] | None = None

    async def serve(self, request: Request) -> Response:
        """Answer with the document.

        Raises:
            ApiError: no engine can be asked.
        """
        if self._document is None:
            self._document = document(await self._engines_own(), self._settings.model_id)
        return JSONResponse(self._document)

    async def _engines_own(self) -> dict[str, Any]:
        for engine in by_leisure(await self._table.engines()):
            try:
                return await self._upstream.described(engine.url)
            except EngineUnreachable:
                continue
        raise ApiError(
            503,
            "no engine is ready to describe what it serves; try again shortly",
            "unavailable",
            retry_after_s=5,
        )


def document(theirs: dict[str, Any], model_id: str) -> dict[str, Any]:
    """Return the whole OpenAPI document.

    Args:
        theirs: an engine's own document.
    """
    schemas = copy.deepcopy(theirs.get("components", {}).get("schemas", {}))
    paths = copy.deepcopy(interface.PATHS)
    for path in (*TURN_PATHS, *TOKEN_PATHS):
        body = copy.deepcopy(theirs["paths"][path]["post"]["requestBody"])
        paths[path]["post"]["requestBody"] = body
        for name in _references(body):
            _complete(schemas[name], path, model_id)
    # The body is read as that of the turn.
    paths[COUNT_INPUT]["post"]["requestBody"] = copy.deepcopy(
        paths[RESPONSES]["post"]["requestBody"]
    )
    components = {**interface.COMPONENTS, "schemas": {**schemas, **interface.SCHEMAS}}
    used = _used(paths, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ConServe",
            "version": version("conserve"),
            "description": interface.DESCRIPTION,
        },
        "paths": paths,
        "components": {
            **components,
            "schemas": {k: v for k, v in components["schemas"].items() if k in used},
        },
    }


def _complete(schema: dict[str, Any], path: str, model_id: str) -> None:
    """Add to vLLM's schema of a request what this router takes, sets and drops."""
    properties = schema["properties"]
    properties["model"] = {"type": "string", "enum": [model_id]}
    if path in TURN_PATHS:
        properties |= parameters.BODY_FIELDS | {
            name: field for name, field in parameters.READ_FIELDS.items() if name not in properties
        }
        for name, why in parameters.DROPPED.items():
            properties[name] = {"description": f"Dropped. {why}", "deprecated": True}
    properties |= parameters.CHANGED.get(path, {})
    needed = parameters.NEEDED[path]
    # Where a client names no model, the router does.
    schema["required"] = sorted({*schema.get("required", ()), *needed} - {"model"})
    for name, more in needed.items():
        properties[name] = {**_not_null(properties[name]), **more}


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" not in schema:
        return schema
    return {**schema, "anyOf": [one for one in schema["anyOf"] if one.get("type") != "null"]}


def _used(paths: dict[str, Any], components: dict[str, Any]) -> set[str]:
    """Return the names of the schemas that the paths refer to, directly or not."""
    used: set[str] = set()
    rest = [paths, *(part for name, part in components.items() if name != "schemas")]
    while rest:
        for name in _references(rest.pop()):
            if name not in used:
                used.add(name)
                rest.append(components["schemas"][name])
    return used


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, list):
        for inner in part:
            yield from _references(inner)
    elif isinstance(part, dict):
        for name, inner in part.items():
            if name in ("$ref", "mapping"):
                values = [inner] if name == "$ref" else inner.values()
                yield from (v.removeprefix(_SCHEMAS) for v in values if v.startswith(_SCHEMAS))
            else:
                yield from _references(inner)
