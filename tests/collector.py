"""An OpenTelemetry collector for tests: takes OTLP by HTTP, and keeps the spans."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span as it came; ids are hexadecimal."""

    service: str
    name: str
    trace_id: str
    id: str
    parent_id: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """Listens on loopback during a ``with`` block.

    Args:
        port: 0: any that is free.
        answers: False: it takes requests and never answers.

    Attributes:
        spans: all that have come, in their order.
        asked: how many requests have come.
    """

    def __init__(self, port: int = 0, *, answers: bool = True) -> None:
        self.spans: list[Span] = []
        self.asked = 0
        self._over = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                raw = self.rfile.read(int(self.headers["content-length"]))
                collector.asked += 1
                if not answers:
                    collector._over.wait()
                    return
                collector.spans += _spans(raw)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait_for(self, there: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Wait until something is true of the spans; fails with all their names."""
        deadline_s = time.monotonic() + timeout_s
        while not there():
            names = [(span.service, span.name) for span in self.spans]
            assert time.monotonic() < deadline_s, names
            time.sleep(0.05)


def _spans(raw: bytes) -> list[Span]:
    found = []
    for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
        of = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            found += [
                Span(
                    of["service.name"],
                    one.name,
                    one.trace_id.hex(),
                    one.span_id.hex(),
                    one.parent_span_id.hex(),
                    one.kind,
                    one.start_time_unix_nano,
                    one.end_time_unix_nano,
                    _attributes(one.attributes),
                    one.status.code == 2,
                )
                for one in scope.spans
            ]
    return found


def _attributes(given: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in given}
