"""Traces of turns (OpenTelemetry): what routers and engines need for them, beside their spans.

Nothing here loads OpenTelemetry, which comes with vLLM.
"""

import logging
import math
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


def tell_of_lost_collector(settings: Settings) -> None:
    """Have this process's log say once a minute that spans are lost, in words of our own.

    It is in the place of all that OpenTelemetry says of it.
    """
    if settings.tracing.url is None:
        return
    told_s = -math.inf

    def told(record: logging.LogRecord) -> bool:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            logger.warning(
                "traces do not get to %s; turns are served without them. Is a collector there that "
                "takes OTLP by HTTP (`tracing.endpoint`)? %s",
                settings.tracing.url, record.getMessage(),
            )  # fmt: skip
        return False

    for name in _LOGGERS:
        logging.getLogger(name).addFilter(told)
