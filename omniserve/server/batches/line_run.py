"""One line of a batch, run as an HTTP request would be."""

from __future__ import annotations

import json
import time
from http import HTTPStatus
from typing import Any

from omniserve.core.request import ServiceClass
from omniserve.server.answers import ENDPOINTS
from omniserve.server.batches.lines import body_of
from omniserve.server.batches.progress import LineResult, PendingLine
from omniserve.server.batches.store import new_id
from omniserve.server.batches.tables import SUSPECT_STOPS
from omniserve.server.errors import ApiError
from omniserve.server.protocol import GenerationRequest, SloFields, class_of_tier, parse
from omniserve.server.service import Service, new_call_id

MAX_ENGINE_STOPS = SUSPECT_STOPS + 1
"""As often may the engine end while a line runs; then the line is what ends it, as far as one can know.

Not more often than the engine is started again in a row.
"""
ESCALATED_TIER = "default"
"""The tier of a line that hurries."""
_RETRY_S = 1.0


class LineNotRun(Exception):
    """The line has no result yet, through no fault of its own.

    Args:
        reason: Why.
        delay_s: When to try again.
        engine_stopped: Whether the engine ended while the line ran.
    """

    def __init__(self, reason: str, *, delay_s: float, engine_stopped: bool) -> None:
        super().__init__(reason)
        self.delay_s = delay_s
        self.engine_stopped = engine_stopped


async def run_line(service: Service, line: PendingLine, raw: bytes, *, escalated: bool) -> LineResult:
    """Run a line; a request that is wrong has an error as its result.

    Args:
        service: Runs it.
        line: What is to be run.
        raw: Its bytes in the input file.
        escalated: Run it as a latency-sensitive request instead of a best-effort one.

    Raises:
        LineNotRun: Try again later.
    """
    endpoint = ENDPOINTS[line.endpoint]
    call_id = new_call_id(endpoint.id_prefix)
    try:
        request = _classed(service, parse(endpoint.request_kind, body_of(raw)), escalated)
        service.check_open()
        service.check_model(request.model)
        outputs = await service.begin(request, call_id, time.monotonic())
        try:
            await outputs.start()
            shape = endpoint(service, request, call_id)
            answer = shape.answer(await outputs.collect(), outputs.usage.as_dict())
        finally:
            service.end(outputs)
    except ApiError as error:
        engine_stopped = error.code == "engine_stopped" and error.status == HTTPStatus.INTERNAL_SERVER_ERROR
        again = error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE) or (
            engine_stopped and line.engine_stops + 1 < MAX_ENGINE_STOPS
        )
        if again:
            delay_s = max(_RETRY_S, error.retry_after_s or 0.0)
            raise LineNotRun(error.message, delay_s=delay_s, engine_stopped=engine_stopped) from None
        return refused(line, error, call_id)
    usage = outputs.usage
    return LineResult(
        key=line.key,
        ok=True,
        text=_text(line.custom_id, _response(HTTPStatus.OK, call_id, answer.decode())),
        num_input_tokens=usage.num_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
    )


def refused(line: PendingLine, error: ApiError, call_id: str) -> LineResult:
    """Return the result of a line that has an error instead of an answer."""
    response = _response(error.status, call_id, json.dumps(error.body()))
    return LineResult(key=line.key, ok=False, text=_text(line.custom_id, response))


def not_run_text(custom_id: str, outcome: str) -> str:
    """Return the line of the error file for a request whose batch ended before it was run."""
    why = "expired before this request was run" if outcome == "expired" else "was cancelled before this request was run"
    return _text(custom_id, "null", {"code": f"batch_{outcome}", "message": f"the batch {why}; send it again"})


def _classed(service: Service, request: GenerationRequest, escalated: bool) -> GenerationRequest:
    """Return the request as one of the class that it is to run in."""
    if request.stream:
        raise ApiError("a line of a batch cannot be streamed; remove stream", param="stream")
    tier = "flex" if request.service_tier in ("auto", "default") else request.service_tier
    if class_of_tier(tier, service.info.classes).kind != ServiceClass.BE:
        raise ApiError(
            f"service_tier {tier!r} is latency-sensitive, and lines of a batch are best-effort; remove service_tier, "
            "or send the request by itself",
            param="service_tier",
            code="invalid_value",
        )
    if escalated:
        # Without objectives: admission control shall not refuse it.
        return request.model_copy(update={"service_tier": ESCALATED_TIER, "slo": SloFields(ttft_s=None, tpot_s=None)})
    return request.model_copy(update={"service_tier": tier})


def _response(status: int, request_id: str, body: str) -> str:
    return f'{{"status_code": {int(status)}, "request_id": {json.dumps(request_id)}, "body": {body}}}'


def _text(custom_id: str, response: str, error: dict[str, Any] | None = None) -> str:
    head = f'"id": {json.dumps(new_id("batch_req_"))}, "custom_id": {json.dumps(custom_id)}'
    return f'{{{head}, "response": {response}, "error": {json.dumps(error)}}}'
