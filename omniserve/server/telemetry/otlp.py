"""OpenTelemetry: the spans of a call, sent to a collector by OTLP over HTTP in the background.

A call's spans are made when it is over, from the times that it was answered with anyway: until then it costs nothing.
``omniserve.request`` is the call as HTTP saw it; below it, for each of its choices, ``queue`` (from arrival to the
first step with a token of it), ``prefill`` (to its first output token), ``decode`` (to the last one) and an
``away on host`` for each stay on the host tier, with the copies there and back. Attributes are those of OpenTelemetry's
conventions for generative AI where there is one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omniserve.core.request import FinishReason
from omniserve.core.version import __version__
from omniserve.server.choice import Choice
from omniserve.server.errors import ApiError
from omniserve.server.output_stream import OutputStream
from omniserve.server.telemetry.calls import TRACED_PATHS, FinishedCall

logger = logging.getLogger(__name__)

_TRACES_PATH = "/v1/traces"
# What is not sent by then, at the end, is lost: a collector that is gone must not hold the server.
_FLUSH_S = 5.0


class OtlpTraces:
    """Sends a trace of each call to a collector: to its base URL, or where OpenTelemetry's environment variables say.

    A collector that is slow or gone costs spans, with a warning, and never a call.
    """

    def __init__(self, endpoint: str | None, *, model_name: str) -> None:
        self._model_name = model_name
        url = None
        if endpoint is not None:
            url = endpoint if endpoint.endswith(_TRACES_PATH) else endpoint.rstrip("/") + _TRACES_PATH
        self._exporter = OTLPSpanExporter(endpoint=url)
        resource = Resource.create({"service.name": "omniserve", "service.version": __version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),  # the environment may call it something else
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("omniserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: FinishedCall) -> None:
        """Queue the spans of a call that is over; they are sent by another thread."""
        offset_ns = time.time_ns() - time.monotonic_ns()

        def ns(monotonic_s: float) -> int:
            """Return nanoseconds since 1970, by what both clocks say now."""
            return offset_ns + round(monotonic_s * 1e9)

        root = self._tracer.start_span(
            "omniserve.request",
            context=self._propagator.extract(call.headers, context=Context()),
            kind=SpanKind.SERVER,
            start_time=ns(call.began_s),
        )
        if root.is_recording():
            self._describe(root, call)
            if call.outputs is not None:
                below = trace.set_span_in_context(root, Context())
                for choice in call.outputs.choices:
                    self._add_parts(choice, call, ns, below)
        root.end(ns(call.ended_s))

    def close(self) -> None:
        """Send what was not sent yet; give it up after a few seconds."""
        # Not a thread that the interpreter would wait for at its end.
        flush = threading.Thread(target=self._provider.shutdown, name="otlp-flush", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        if flush.is_alive():
            logger.warning("the collector of traces did not take the last spans within %g s: they are lost", _FLUSH_S)
            self._exporter.shutdown()

    def _describe(self, span: Span, call: FinishedCall) -> None:
        span.set_attribute("gen_ai.operation.name", TRACED_PATHS[call.path])
        span.set_attribute("gen_ai.provider.name", "omniserve")
        span.set_attribute("gen_ai.request.model", self._model_name)
        span.set_attribute("url.path", call.path)
        if call.request_id is not None:
            span.set_attribute("omniserve.request_id", call.request_id)
        if call.status is not None:
            span.set_attribute("http.response.status_code", call.status)
        if call.outputs is not None:
            _describe_outputs(span, call.outputs)
        _set_status(span, call)

    def _add_parts(self, choice: Choice, call: FinishedCall, ns: Callable[[float], int], below: Context) -> None:
        times = choice.engine_times
        if times is None or times.first_scheduled_s is None:
            return  # it had no output, so what it waited for is not known here
        ended_s = times.finished_s
        if ended_s is None:
            # The engine was told to end it: for a stop string, or because its client has left.
            by_itself = choice.finish_reason == FinishReason.STOP
            last_s = choice.times.last_token_s
            ended_s = last_s if by_itself and last_s is not None else call.ended_s
        parts = [("queue", times.arrival_s, times.first_scheduled_s)]
        if times.first_token_s is not None:
            parts.append(("prefill", times.first_scheduled_s, times.first_token_s))
            parts.append(("decode", times.first_token_s, ended_s))
        parts += [("away on host", *stay) for stay in choice.host_stays]
        if times.host_since_s is not None:
            parts.append(("away on host", times.host_since_s, ended_s))
        for name, from_s, to_s in parts:
            attributes = {"omniserve.choice": choice.index}
            part = self._tracer.start_span(name, context=below, start_time=ns(from_s), attributes=attributes)
            part.end(ns(to_s))


def _describe_outputs(span: Span, outputs: OutputStream) -> None:
    job, choices, usage = outputs.job, outputs.choices, outputs.usage
    span.set_attribute("gen_ai.response.id", job.call_id)
    span.set_attribute("gen_ai.request.max_tokens", choices[0].request.sampling.max_tokens)
    span.set_attribute("gen_ai.usage.input_tokens", usage.num_prompt_tokens)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.num_cached_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.num_output_tokens)
    span.set_attribute("gen_ai.response.finish_reasons", [c.finish_reason for c in choices if c.finish_reason])
    span.set_attribute("omniserve.service_class", job.service_class)
    span.set_attribute("omniserve.host_tokens", sum(choice.num_host_tokens for choice in choices))
    if outputs.predicted_ttft_s is not None:
        span.set_attribute("omniserve.predicted_ttft_s", outputs.predicted_ttft_s)
    slo = outputs.scaled_slo or job.slo
    for name, limit_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)):
        taken = [choice.times.ttft_s if name == "ttft" else choice.times.tpot_s for choice in choices]
        slowest_s = max((seconds for seconds in taken if seconds is not None), default=None)
        if slowest_s is not None:
            span.set_attribute(f"omniserve.{name}_s", slowest_s)
        if limit_s is not None:
            span.set_attribute(f"omniserve.slo.{name}_s", limit_s)
            if slowest_s is not None:
                span.set_attribute(f"omniserve.slo.{name}_met", slowest_s <= limit_s)


def _set_status(span: Span, call: FinishedCall) -> None:
    """Say why a call has no whole answer, if it has none."""
    error = call.error
    if call.was_abandoned:
        kind, reason = "client_disconnected", "the client went away before it had its answer"
    elif isinstance(error, ApiError):
        kind, reason = error.code or str(error.status), error.message
    elif error is not None:
        kind, reason = type(error).__name__, str(error)
    elif call.status is not None and call.status >= HTTPStatus.BAD_REQUEST:
        kind, reason = str(call.status), HTTPStatus(call.status).phrase
    else:
        return
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, reason))
