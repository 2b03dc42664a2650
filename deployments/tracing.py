"""Traces of turns (OpenTelemetry): what routers and engines need for them, beside their spans.

Nothing here loads OpenTelemetry, which comes with vLLM.
"""

import logging
import os
import time
from typing import Any

from conserve.settings import Settings
from conserve.wire import Role

logger = logging.getLogger("ray.serve")

# OpenTelemetry's exporter, and its queue of spans.
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
_TELL_EVERY_S = 60.0
# A batch of spans is given up after this, so that a collector that never answers holds up no
# process that ends.
TIMEOUT_S = 3.0


def traced_arguments(settings: Settings, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the engine arguments by which vLLM adds its own span to each turn's trace.

    vLLM 0.32 ends an engine that should trace and keeps no statistics.
    """
    if settings.tracing.url is None or engine.get("disable_log_stats"):
        return {}
    return {"otlp_traces_endpoint": settings.tracing.url}


def traced_environment(settings: Settings, role: Role) -> dict[str, str]:
    """Return the variables that make vLLM send spans as routers do; an operator's come first."""
    if settings.tracing.url is None:
        return {}
    ours = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": f"{TIMEOUT_S:g}",
        "OTEL_SERVICE_NAME": f"conserve-{role}",
    }
    return {name: value for name, value in ours.items() if name not in os.environ}


class CollectorLost(logging.Filter):
    """Says once a minute that spans are lost, in the place of all that OpenTelemetry says of it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._told_s: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if self._told_s is None or now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            logger.warning(
                "traces do not get to %s; turns are served without them. Is a collector there that "
                "takes OTLP by HTTP (`tracing.endpoint`)? %s", self._url, record.getMessage(),
            )  # fmt: skip
        return False


def tell_of_lost_collector(settings: Settings) -> None:
    """Have this process's log say in our words that the collector does not answer."""
    if settings.tracing.url is None:
        return
    told = CollectorLost(settings.tracing.url)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(told)
