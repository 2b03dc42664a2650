"""Answers probes, from what the router knows already: none waits for another process."""

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from conserve.settings import Settings
from conserve.versions import installed
from conserve.wire import SILENCE_S
from deployments import answers
from deployments.router.errors import answer_response

# The body that KubeRay's probes look for, as Serve's own proxy has it.
_SUCCESS = "success"

LIVE, READY, HEALTHZ, VERSION = "/live", "/ready", "/-/healthz", "/version"


class Probes:
    """Knows whether this router lives and can serve turns, as the table last said.

    While it is `draining`, load balancers send no more requests here.
    """

    def __init__(self, settings: Settings, now_s: Callable[[], float] = time.monotonic) -> None:
        self._versions = answers.Versions(**installed(), model=settings.model_id)
        self._now_s = now_s
        self._heard_s: float | None = None
        self._can_serve = False
        self.draining = False

    def heard(self, can_serve: bool | None) -> None:
        """Note that the table answers; None: it does not know yet whether turns can be served."""
        self._heard_s = self._now_s()
        if can_serve is not None:
            self._can_serve = can_serve

    def not_ready(self) -> str | None:
        """Return why no turn should be sent here now; None: this router can serve turns."""
        if self.draining:
            return "draining: this router ends once it has served what it has"
        if self._heard_s is None:
            return "starting: the conversation table has not answered yet"
        if self._now_s() - self._heard_s > SILENCE_S:
            return f"the conversation table has not answered for {SILENCE_S:g} s"
        return None if self._can_serve else "no decoder can serve turns now"

    def routes(self) -> list[Route]:
        get = ["GET"]
        return [
            Route(LIVE, self._live, methods=get),
            Route(READY, self._ready, methods=get),
            Route(HEALTHZ, self._healthz, methods=get),
            Route(VERSION, self._version, methods=get),
        ]

    async def _live(self, request: Request) -> Response:
        return answer_response(answers.Live())

    async def _ready(self, request: Request) -> Response:
        reason = self.not_ready()
        if reason is None:
            return answer_response(answers.Readiness("ready"))
        return answer_response(answers.Readiness("unavailable", reason), 503)

    async def _healthz(self, request: Request) -> Response:
        reason = self.not_ready()
        return PlainTextResponse(reason or _SUCCESS, 200 if reason is None else 503)

    async def _version(self, request: Request) -> Response:
        return answer_response(self._versions)
