"""Serves `/openapi.json`: `interface`, and vLLM's own schemas of the bodies that engines get."""

import copy
import json
import re
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from conserve.apis import COUNT_INPUT, RESPONSES, TOKEN_PATHS, TURN_PATHS
from conserve.errors import ApiError
from deployments.router import interface
from deployments.router.tokens import by_leisure
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table_client import TableClient
from deployments.tables import Tables

_SCHEMAS = "#/components/schemas/"


class Description:
    """Serves the document, for which an engine is asked once."""

    def __init__(self, models: list[str], table: TableClient | Tables, upstream: Upstream) -> None:
        self._models = models
        self._table = table
        self._upstream = upstream
        self._document: dict[str, Any] | None = None

    async def serve(self, request: Request) -> Response:
        """Answer with the document; raises `ApiError` if no engine can be asked."""
        if self._document is None:
            self._document = document(await self._engines_own(), self._models)
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


def document(theirs: dict[str, Any], models: list[str]) -> dict[str, Any]:
    """Return the whole OpenAPI document, with ``theirs``: an engine's own."""
    schemas = copy.deepcopy(theirs.get("components", {}).get("schemas", {}))
    paths = copy.deepcopy(interface.PATHS)
    for path in (*TURN_PATHS, *TOKEN_PATHS):
        body = copy.deepcopy(theirs["paths"][path]["post"]["requestBody"])
        paths[path]["post"]["requestBody"] = body
        for name in _refers(body):
            _complete(schemas[name], path, models)
    # The body is read as that of the turn.
    paths[COUNT_INPUT]["post"]["requestBody"] = paths[RESPONSES]["post"]["requestBody"]
    components = interface.COMPONENTS
    used = _used([paths, components["responses"]], {**schemas, **interface.SCHEMAS})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ConServe",
            "version": version("conserve"),
            "description": interface.DESCRIPTION,
        },
        "paths": paths,
        "components": {**components, "schemas": used},
    }


def _complete(schema: dict[str, Any], path: str, models: list[str]) -> None:
    """Add to vLLM's schema of a request what this router takes, sets and drops."""
    properties = schema["properties"]
    properties["model"] = {"type": "string", "enum": models}
    if path in TURN_PATHS:
        properties |= interface.BODY_FIELDS
        for name, field in interface.READ_FIELDS.items():
            properties.setdefault(name, field)
    properties |= interface.CHANGED.get(path, {})
    needed = interface.NEEDED.get(path, {})
    # Where a client names no model, the router does.
    schema["required"] = sorted({*schema.get("required", ()), *needed} - {"model"})
    for name, more in needed.items():
        properties[name] |= more
        if "anyOf" in properties[name]:
            kinds = properties[name]["anyOf"]
            properties[name]["anyOf"] = [one for one in kinds if one.get("type") != "null"]


def _refers(part: Any) -> set[str]:
    """Return the names of the schemas that a part of the document refers to."""
    return set(re.findall(f'"{_SCHEMAS}([^"]+)"', json.dumps(part)))


def _used(parts: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas that the parts refer to, directly or not."""
    used: set[str] = set()
    new = _refers(parts)
    while new:
        used |= new
        new = _refers([schemas[name] for name in new]) - used
    return {name: schemas[name] for name in sorted(used)}
