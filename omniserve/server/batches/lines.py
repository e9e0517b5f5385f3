"""Lines of a batch: one JSON object each, a request. Checks an input file as a whole; runs a line as HTTP would."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, BinaryIO, NamedTuple

from omniserve.core.request import ServiceClass
from omniserve.server.access.tiers import class_of_tier, prioritised_tier
from omniserve.server.batches.database import SUSPECT_STOPS
from omniserve.server.batches.endpoints import ENDPOINTS
from omniserve.server.batches.store import new_id
from omniserve.server.completions.protocol import GenerationRequest, R, SloFields
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields, other_encoding, read_json, without_marks, without_nulls
from omniserve.server.responses.chat import ResponsesRequest
from omniserve.server.service import Service, new_call_id

MAX_LINE_BYTES = 32 << 20
"""Largest line in bytes: as much as the body of an HTTP request may have."""
_MAX_FAULTS = 100
_MAX_CUSTOM_ID = 512
NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that databases refuse as text: NUL, and single surrogates."""
_FIELDS = ("custom_id", "method", "url", "body")
MAX_ENGINE_STOPS = SUSPECT_STOPS + 1
"""The number of times that the engine may end while a line runs; then the line is taken for the cause.

At most as many as the engine is started again in a row.
"""
ESCALATED_TIER = "default"
"""The service tier of an escalated line."""
_RETRY_S = 1.0

LineKey = tuple[str, int]
"""Batch and number of a line."""


@dataclass(frozen=True, slots=True)
class LineFault:
    """An error in an input file, with the fields of OpenAI's object."""

    message: str
    code: str | None
    param: str | None = None
    line: int | None = None
    """Line number from 1; None if the error is about the whole file."""


class CheckedLine(NamedTuple):
    """A line that holds a request; its bytes in the file are [start, start + length)."""

    number: int
    custom_id: str
    start: int
    length: int


@dataclass(slots=True)
class CheckedFile:
    """The lines of an input file, which are valid only if there are no faults."""

    lines: list[CheckedLine] = field(default_factory=list)
    faults: list[LineFault] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingLine:
    """A line to be run."""

    batch_id: str
    number: int
    custom_id: str
    endpoint: str
    input_file_id: str
    caller: str | None
    """The name of the API key that its batch belongs to."""
    start: int
    length: int
    engine_stops: int
    """The number of times that the engine died while this line ran."""
    escalated: bool
    """The line runs as a latency-sensitive request."""

    @property
    def key(self) -> LineKey:
        return self.batch_id, self.number

    @property
    def is_suspect(self) -> bool:
        """The line may be the cause of the engine's death."""
        return self.engine_stops >= SUSPECT_STOPS


@dataclass(frozen=True, kw_only=True, slots=True)
class LineResult:
    """The result of a line."""

    key: LineKey
    ok: bool
    text: str
    """The text for the output file, or for the error file."""
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunAgain:
    """A line has no result yet, through no fault of its own."""

    delay_s: float
    """Seconds until the line is tried again."""
    engine_stopped: bool
    """The engine ended while the line ran."""


def check_file(
    file: BinaryIO, endpoint: str, check_model: Callable[[str | None], None], max_lines: int, unknown: UnknownFields
) -> CheckedFile:
    """Check an input file.

    Empty lines are left out, and byte order marks before a line: files that have one may have been joined. At most 100
    faults are named. What a request asks for in detail is checked when it is run, and is then an error of its line
    alone.

    Args:
        file: Read from where it stands.
        endpoint: What every line has to be for.
        check_model: Raises ApiError for a model that is not served.
        max_lines: Most requests.
        unknown: What becomes of fields beside those of a line.
    """
    found, line_of = CheckedFile(), dict[str, int]()
    start = file.tell()
    if (encoding := other_encoding(file.read(4))) is not None:
        message = f"the file is {encoding}; save it as UTF-8"
        return CheckedFile(faults=[LineFault(message, "invalid_encoding")])
    file.seek(start)
    for number, start, raw in _lines(file):
        if len(found.faults) >= _MAX_FAULTS:
            break
        if not without_marks(raw).strip():
            continue
        if len(found.lines) == max_lines:
            message = f"the file has more than {max_lines} requests; divide it into several batches"
            found.faults.append(LineFault(message, "too_many_requests", line=number))
            break
        try:
            if len(raw) > MAX_LINE_BYTES:
                raise _fault(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB; send less", "line_too_long")
            custom_id = _check_line(raw, endpoint, check_model, unknown)
            first = line_of.setdefault(custom_id, number)
            if first != number:
                message = f"the custom_id {custom_id!r} is that of line {first}, too; give each line its own"
                raise _fault(message, "duplicate_custom_id", "custom_id")
        except ApiError as error:
            found.faults.append(LineFault(error.message, error.code, error.param, number))
            continue
        found.lines.append(CheckedLine(number, custom_id, start, len(raw)))
    if not found.lines and not found.faults:
        found.faults.append(LineFault("the file has no requests; put one JSON object on each line", "empty_file"))
    return found


def body_of(raw: bytes) -> bytes:
    """Return the JSON text of the request that a checked line holds."""
    return json.dumps(read_json(raw)["body"]).encode()


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, place and bytes of each line; of one that is too long, a byte more than is allowed."""
    number, start = 0, file.tell()
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        yield number, start, raw
        rest = raw
        while len(rest) == MAX_LINE_BYTES + 1 and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        start = file.tell()


def _fault(message: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(message, code=code, param=param)


def _check_line(raw: bytes, endpoint: str, check_model: Callable[[str | None], None], unknown: UnknownFields) -> str:
    """Return the line's custom_id."""
    try:
        line = read_json(raw)  # as the body of an HTTP request is read, so that what is good here is good there
    except ValueError as error:
        hint = "; each request needs a line of its own" if "trailing characters" in str(error) else ""
        raise _fault(f"the line is not valid JSON: {error}{hint}", "invalid_json_line") from None
    if not isinstance(line, dict):
        raise _fault("the line must be a JSON object", "invalid_json_line")
    for name in _FIELDS:
        if name not in line:
            raise _fault(f"{name} is missing", "missing_required_parameter", name)
    for name in without_nulls(line).keys() - set(_FIELDS):
        if unknown.refuse:
            message = f"unknown field {name!r}: remove it; known: {', '.join(_FIELDS)}"
            raise _fault(message, "unknown_parameter", name)
        unknown.warn(name)
    custom_id, method, url, body = (line[name] for name in _FIELDS)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID or NO_TEXT.search(custom_id):
        raise _fault(
            f"custom_id must be a string of 1 to {_MAX_CUSTOM_ID} characters", "invalid_custom_id", "custom_id"
        )
    if method != "POST":
        raise _fault(f"method must be 'POST', got {method!r}", "invalid_method", "method")
    if url != endpoint:
        raise _fault(f"url must be the batch's endpoint, {endpoint!r}; got {url!r}", "mismatched_url", "url")
    if not isinstance(body, dict):
        raise _fault("body must be a JSON object", "invalid_body", "body")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _fault("body.model must be a string", "invalid_model", "body.model")
    try:
        check_model(model)
    except ApiError as error:
        raise _fault(error.message, error.code or "model_not_found", "body.model") from None
    return custom_id


async def run_line(service: Service, line: PendingLine, raw: bytes, *, escalated: bool) -> LineResult | RunAgain:
    """Run a line, of which ``raw`` is the text; a request that is wrong has an error as its result.

    If it is escalated, it runs as a latency-sensitive request instead of a best-effort one.
    """
    endpoint = ENDPOINTS[line.endpoint]
    call_id = new_call_id(endpoint.id_prefix)
    try:
        request = await endpoint.read(service, body_of(raw), caller=line.caller)
        request = _classed(service, request, escalated)
        endpoint.check_open(service)
        endpoint.check_model(service, request.model)
        outputs = await endpoint.outputs(service, request, call_id, time.monotonic(), line.caller)
        try:
            await outputs.start()
            shape = endpoint(service, request, call_id)
            answer = await shape.written(await outputs.collect(), outputs.usage)
        finally:
            service.end(outputs)
    except ApiError as error:
        engine_stopped = error.code == "engine_stopped" and error.status == HTTPStatus.INTERNAL_SERVER_ERROR
        again = error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE) or (
            engine_stopped and line.engine_stops + 1 < MAX_ENGINE_STOPS
        )
        if again and not error.is_final:
            return RunAgain(max(_RETRY_S, error.retry_after_s or 0.0), engine_stopped)
        return refused(line, error, call_id, endpoint.error_body(error))
    usage = outputs.usage
    return LineResult(
        key=line.key,
        ok=True,
        text=_text(line.custom_id, _response(HTTPStatus.OK, call_id, answer.decode())),
        num_input_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
    )


def refused(line: PendingLine, error: ApiError, call_id: str, body: Mapping[str, Any] | None = None) -> LineResult:
    """Return the result of a line that has an error instead of an answer; ``body``: as its endpoint writes it."""
    response = _response(error.status, call_id, json.dumps(error.body() if body is None else body))
    return LineResult(key=line.key, ok=False, text=_text(line.custom_id, response))


def not_run_text(custom_id: str, outcome: str) -> str:
    """Return the line of the error file for a request whose batch ended before it was run."""
    why = "expired before this request was run" if outcome == "expired" else "was cancelled before this request was run"
    return _text(custom_id, "null", {"code": f"batch_{outcome}", "message": f"the batch {why}; send it again"})


def _classed(service: Service, request: R, escalated: bool) -> R:
    """Return the request as one of the class that it is to run in."""
    if isinstance(request, GenerationRequest) and request.stream:
        raise ApiError("a line of a batch cannot be streamed; remove stream", param="stream")
    if isinstance(request, ResponsesRequest) and request.asked.background:
        raise ApiError("a line of a batch has its answer in the output file; remove background", param="background")
    tier = "flex" if request.service_tier in ("auto", "default") else request.service_tier
    classes = service.info.classes
    if class_of_tier(tier, classes).kind != ServiceClass.BE:
        raise ApiError(
            f"service_tier {tier!r} is latency-sensitive, and lines of a batch are best-effort; remove service_tier, "
            "or send the request by itself",
            param="service_tier",
            code="invalid_value",
        )
    if escalated:
        # Without objectives: admission control shall not refuse it.
        return request.model_copy(update={"service_tier": ESCALATED_TIER, "slo": SloFields.model_validate({})})
    if request.priority:
        tier = prioritised_tier(tier, request.priority, classes, kind=ServiceClass.BE)
    return request.model_copy(update={"service_tier": tier})


def _response(status: int, request_id: str, body: str) -> str:
    return f'{{"status_code": {int(status)}, "request_id": {json.dumps(request_id)}, "body": {body}}}'


def _text(custom_id: str, response: str, error: dict[str, Any] | None = None) -> str:
    head = f'"id": {json.dumps(new_id("batch_req_"))}, "custom_id": {json.dumps(custom_id)}'
    return f'{{{head}, "response": {response}, "error": {json.dumps(error)}}}'
