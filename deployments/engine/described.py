"""Describes an engine's own HTTP interface at `/openapi.json`, for which routers ask."""

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from conserve.apis import TOKEN_PATHS, TURN_PATHS

_DESCRIBED = (*TURN_PATHS, *TOKEN_PATHS)


def describe(app: FastAPI) -> None:
    """Make the document now, before anybody waits for tokens of this engine.

    Made at its first request, as FastAPI would, and of all of vLLM's paths, it keeps the engine's
    event loop for some 3 s, in which no stream gets a token; of those few, for 0.2 s.
    """
    routes = [route for route in app.routes if getattr(route, "path", None) in _DESCRIBED]
    app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=routes)
