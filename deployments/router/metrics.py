"""Serves `/metrics`, and where else Prometheus finds metrics."""

import asyncio
import math
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conserve.loopback import is_loopback
from deployments.answers import Engine, Targets
from deployments.router.access import is_here
from deployments.table_client import TABLE_UP, TableClient, TableUnavailable

# Prometheus says for how long it will wait. An answer before that tells more than none.
_PATIENCE_HEADER = "x-prometheus-scrape-timeout-seconds"
_PATIENCE_SHARE = 0.8
_LONGEST_S = 60.0


class MetricsPaths:
    """Serves the table's metrics, and addresses of engines and LMCache servers that have theirs."""

    def __init__(self, table: TableClient) -> None:
        self._table = table

    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/metrics/targets", self._targets, methods=["GET"]),
        ]

    async def _metrics(self, request: Request) -> Response:
        """Answer with the table's metrics; a scraper that cannot wait is told that it is silent."""
        patience_s = _patience_s(request)
        try:
            async with asyncio.timeout(patience_s or _LONGEST_S):
                text = await self._table.metrics()
        except (TimeoutError, TableUnavailable) as error:
            if patience_s is None:
                raise TableUnavailable("the conversation table does not answer") from error
            text = _silent_table()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _targets(self, request: Request) -> Response:
        """Answer in the form of Prometheus' `http_sd_configs`."""
        engines = await self._table.engines(soon=True)
        found = [*_targets(engines, here=is_here(request.scope))]
        return Response(msgspec.json.encode(found), media_type="application/json")


def _silent_table() -> bytes:
    """Return the answer to a scrape that the table does not answer in time."""
    registry = CollectorRegistry()
    Gauge(*TABLE_UP, registry=registry)
    return generate_latest(registry)


def _patience_s(request: Request) -> float | None:
    """Return how long a scrape may take; None: its client does not say."""
    try:
        said_s = float(request.headers[_PATIENCE_HEADER])
    except (KeyError, ValueError):
        return None
    return min(_LONGEST_S, _PATIENCE_SHARE * said_s) if 0 < said_s < math.inf else None


def _targets(engines: list[Engine], *, here: bool) -> Iterator[Targets]:
    """Yield what a client can reach; what listens on loopback, only to one on this machine."""
    caches: list[str] = []
    for engine in engines:
        address = urlsplit(engine.url)
        on_loopback = is_loopback(address.hostname or "")
        if on_loopback and not here:
            continue
        # vLLM's own metrics have a label `engine`.
        labels = {"part": "engine", "role": engine.role, "replica": engine.id}
        yield Targets([address.netloc], labels)
        if on_loopback and engine.cache_metrics:
            caches.append(engine.cache_metrics)
    # The engines of a node share its server.
    for cache in dict.fromkeys(caches):
        yield Targets([cache], {"part": "lmcache"})
