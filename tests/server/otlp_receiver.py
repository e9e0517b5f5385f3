"""A collector of OpenTelemetry traces: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    message: str
    service: str

    def encloses(self, other: ReceivedSpan) -> bool:
        return self.start_ns <= other.start_ns <= other.end_ns <= self.end_ns


class OtlpReceiver:
    """A collector of traces: the address where it listens, and what it got."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[ReceivedSpan] = []
        self.paths: set[str] = set()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes=values(span.attributes),
                            is_error=span.status.code == Status.STATUS_CODE_ERROR,
                            message=span.status.message,
                            service=service,
                        )
                    )

    def root(self, request_id: str) -> ReceivedSpan:
        """Return the span of a request when it has come, which is after those below it."""
        deadline = time.monotonic() + 20
        while True:
            for span in tuple(self.spans):
                if span.attributes.get("omniserve.request_id") == request_id:
                    return span
            assert time.monotonic() < deadline, f"no span of {request_id} in {self.spans}"
            time.sleep(0.02)

    def below(self, root: ReceivedSpan) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.parent_id == root.span_id]


def values(attributes: Any) -> dict[str, Any]:
    return {entry.key: value(entry.value) for entry in attributes}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)


@contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    """Run a receiver on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
