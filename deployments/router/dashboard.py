"""Serves the dashboard: a static page that listens to ``GET /v1/events`` (docs/dashboard.md).

The page has no data in it, so it needs no key. What it asks for does.
"""

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

PATH = "/dashboard"
_FOLDER = Path(__file__).with_name("page")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("page.css", "feed.js", "page.js", "paint.js", "state.js")
PATHS = (PATH, *(f"{PATH}/{name}" for name in FILES))
_HEADERS = {
    # A router of another version has other files.
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Dashboard:
    """Answers with the page's files, which it reads once."""

    def __init__(self) -> None:
        self._files = {name: _File(name) for name in ("index.html", *FILES)}

    def routes(self) -> list[Route]:
        """Return the page's paths."""
        return [Route(path, self._serve, methods=["GET"]) for path in (PATH, PATH + "/{file}")]

    async def _serve(self, request: Request) -> Response:
        name = request.path_params.get("file", "index.html")
        if name not in self._files or request.url.path not in PATHS:
            raise HTTPException(404)
        if name == "index.html" and request.scope.get("raw_path", b"").endswith(b"/"):
            # The page's links lead from the path without a slash, whatever a proxy puts before it.
            return RedirectResponse(f"..{PATH}")
        return self._files[name].answer(request.headers.get("if-none-match", ""))


class _File:
    def __init__(self, name: str) -> None:
        self._content = (_FOLDER / name).read_bytes()
        self._type = _TYPES[name.rpartition(".")[2]]
        self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'

    def answer(self, known: str) -> Response:
        headers = {**_HEADERS, "etag": self._tag}
        if self._tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._type, headers=headers)
