"""A trace for each turn: its span, and one for each of its phases (OpenTelemetry).

`TurnEndpoint` loads this file, and OpenTelemetry, only where `tracing.endpoint` is set. Spans are
made at a turn's end from the times that the router has taken anyway; the turn's own span begins
with it, so that engines' spans are its children. Names are those of OpenTelemetry's conventions
for generative AI, and `conserve.*` for what these do not know.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from conserve import identity
from conserve.apis import COMPLETIONS
from conserve.settings import Settings
from conserve.turn import TurnKey, TurnStats
from deployments.router.phases import Phase
from deployments.tracing import TIMEOUT_S, tell_of_lost_collector

_W3C = TraceContextTextMapPropagator()
# OpenTelemetry's default is five seconds, and a router that ends loses as much.
_EVERY_MS = 1000


class Spans:
    """Makes the spans of a router's turns, and sends them to the collector from a thread.

    What the collector does not take in time is dropped, from a queue of bounded length; turns never
    wait. The standard ``OTEL_`` variables set the rest: headers, sampling, sizes, the service's
    name.
    """

    def __init__(self, settings: Settings, router_id: str) -> None:
        self._model = settings.model_id
        resource = {"service.instance.id": router_id}
        if "OTEL_SERVICE_NAME" not in os.environ:
            resource["service.name"] = "conserve-router"
        timed = any(f"OTEL_EXPORTER_OTLP{of}_TIMEOUT" in os.environ for of in ("", "_TRACES"))
        exporter = OTLPSpanExporter(settings.tracing.url, timeout=None if timed else TIMEOUT_S)
        tell_of_lost_collector(settings)
        delay_ms = None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else _EVERY_MS
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms)
        # A process that ends does not wait for the collector.
        provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("conserve")

    def begin(self, scope: Scope, arrived_s: float) -> "TurnSpan":
        """Begin a turn's span, within its client's trace if its request names one.

        ``arrived_s`` is by `time.perf_counter`.
        """
        headers = Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        # Times of phases are readings of another clock.
        zero_ns = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            "turn",
            context=_W3C.extract(given),
            kind=SpanKind.SERVER,
            start_time=zero_ns + int(arrived_s * 1e9),
        )
        return TurnSpan(self._tracer, span, zero_ns, scope["path"], self._model)


class TurnSpan:
    """The span of one turn under way; with `headers`, an engine's spans become its children."""

    def __init__(
        self, tracer: trace.Tracer, span: trace.Span, zero_ns: int, path: str, model: str
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._zero_ns = zero_ns
        self._path = path
        self._model = model
        self._context = trace.set_span_in_context(span)
        self.headers: dict[str, str] = {}
        _W3C.inject(self.headers, self._context)

    def end(
        self, turn: TurnKey | None, stats: TurnStats, phases: Sequence[Phase] = (), model: str = ""
    ) -> None:
        """End the turn's span, with those of its phases; ``model`` is empty if it was not read."""
        if not self._span.is_recording():
            return  # The client's trace is not sampled.
        for phase in phases:
            self._add(phase)
        operation = "text_completion" if self._path == COMPLETIONS else "chat"
        model = model or self._model
        self._span.update_name(f"{operation} {model}")
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "conserve",
                "gen_ai.request.model": model,
                "url.path": self._path,
                **turn_attributes(turn, stats),
            }
        )
        if stats.outcome in ("refused", "failed"):
            self._span.set_attribute("error.type", stats.error or stats.outcome)
            self._span.set_status(Status(StatusCode.ERROR, stats.error))
        self._span.end()

    def _add(self, phase: Phase) -> None:
        span = self._tracer.start_span(
            phase.name,
            context=self._context,
            kind=SpanKind.INTERNAL if phase.engine_id is None else SpanKind.CLIENT,
            attributes={} if phase.engine_id is None else {"conserve.engine": phase.engine_id},
            start_time=self._zero_ns + int(phase.began_s * 1e9),
        )
        if phase.failed is not None:
            span.set_attribute("error.type", phase.failed)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._zero_ns + int(phase.ended_s * 1e9))


_ATTRIBUTES = (
    ("conserve.tenant", "tenant"),
    ("conserve.request.id", "request_id"),
    ("conserve.outcome", "outcome"),
    ("conserve.engine", "decoder_id"),
    ("conserve.prefiller", "prefiller_id"),
    ("conserve.placement.reason", "placement"),
    ("conserve.ttft_s", "ttft_s"),
)
# Of a turn that its decoder has served to the end; those below only if there were any.
_SERVED = (
    ("gen_ai.usage.input_tokens", "prompt_tokens"),
    ("gen_ai.usage.output_tokens", "output_tokens"),
    ("gen_ai.usage.cache_read.input_tokens", "reused_tokens"),
    ("conserve.cached_tokens", "decoder_cached_tokens"),
    ("conserve.loaded_tokens", "lmcache_tokens"),
    ("conserve.waited_for", "engine_wait_for"),
)
_IF_ANY = (("conserve.continued", "continued"), ("conserve.missed_tokens", "missed_tokens"))


def turn_attributes(turn: TurnKey | None, stats: TurnStats) -> Mapping[str, Any]:
    """Return what is known of a turn, as its span has it."""
    found: dict[str, Any] = {}
    if turn is not None:
        found["gen_ai.conversation.id"] = identity.own_id(turn.history_id)
        found["conserve.history"] = identity.number_of(turn.history_id)
    rows = (*_ATTRIBUTES, *_SERVED) if stats.prompt_tokens else _ATTRIBUTES
    found |= {name: getattr(stats, field) for name, field in rows}
    found |= {name: getattr(stats, field) or None for name, field in _IF_ANY}
    return {name: value for name, value in found.items() if value is not None}
