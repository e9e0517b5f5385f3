"""An input file: one JSON object a line, each a request. Checked as a whole before any line is run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from pydantic_core import from_json

from omniserve.server.errors import ApiError

MAX_LINE_BYTES = 32 << 20
"""Largest line in bytes: as much as the body of an HTTP request may have."""
_MAX_FAULTS = 100
_MAX_CUSTOM_ID = 512
NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that databases refuse as text: NUL, and single surrogates."""
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class LineFault:
    """An error in an input file."""

    message: str
    code: str
    param: str | None = None
    line: int | None = None
    """Line number from 1; None if the error is about the whole file."""

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class CheckedLine:
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


class _Fault(Exception):
    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def check_file(file: BinaryIO, endpoint: str, check_model: Callable[[str | None], None], max_lines: int) -> CheckedFile:
    """Check an input file.

    Empty lines are left out. At most 100 faults are named. What a request asks for in detail is checked when it is run,
    and is then an error of its line alone.

    Args:
        file: Read from where it stands.
        endpoint: What every line has to be for.
        check_model: Raises ApiError for a model that is not served.
        max_lines: Of requests.
    """
    found, line_of = CheckedFile(), dict[str, int]()
    for number, start, raw in _lines(file):
        if len(found.faults) >= _MAX_FAULTS:
            break
        if not raw.strip():
            continue
        if len(found.lines) == max_lines:
            message = f"the file has more than {max_lines} requests; divide it into several batches"
            found.faults.append(LineFault(message, "too_many_requests", line=number))
            break
        try:
            if len(raw) > MAX_LINE_BYTES:
                raise _Fault(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB; send less", "line_too_long")
            custom_id = _check_line(raw, endpoint, check_model)
            first = line_of.setdefault(custom_id, number)
            if first != number:
                message = f"the custom_id {custom_id!r} is that of line {first}, too; give each line its own"
                raise _Fault(message, "duplicate_custom_id", "custom_id")
        except _Fault as fault:
            found.faults.append(LineFault(str(fault), fault.code, fault.param, number))
            continue
        found.lines.append(CheckedLine(number, custom_id, start, len(raw)))
    if not found.lines and not found.faults:
        found.faults.append(LineFault("the file has no requests; put one JSON object on each line", "empty_file"))
    return found


def body_of(raw: bytes) -> bytes:
    """Return the JSON text of the request that a checked line holds."""
    return json.dumps(from_json(raw)["body"]).encode()


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


def _check_line(raw: bytes, endpoint: str, check_model: Callable[[str | None], None]) -> str:
    """Return the line's custom_id."""
    try:
        line = from_json(raw)  # as the body of an HTTP request is read, so that what is good here is good there
    except ValueError as error:
        raise _Fault(f"the line is not valid JSON: {error}", "invalid_json_line") from None
    if not isinstance(line, dict):
        raise _Fault("the line must be a JSON object", "invalid_json_line")
    for name in _FIELDS:
        if name not in line:
            raise _Fault(f"{name} is missing", "missing_required_parameter", name)
    if unknown := next((name for name in line if name not in _FIELDS), None):
        raise _Fault(f"unknown field {unknown!r}: remove it; known: {', '.join(_FIELDS)}", "unknown_parameter", unknown)
    custom_id, method, url, body = (line[name] for name in _FIELDS)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID or NO_TEXT.search(custom_id):
        raise _Fault(
            f"custom_id must be a string of 1 to {_MAX_CUSTOM_ID} characters", "invalid_custom_id", "custom_id"
        )
    if method != "POST":
        raise _Fault(f"method must be 'POST', got {method!r}", "invalid_method", "method")
    if url != endpoint:
        raise _Fault(f"url must be the batch's endpoint, {endpoint!r}; got {url!r}", "mismatched_url", "url")
    if not isinstance(body, dict):
        raise _Fault("body must be a JSON object", "invalid_body", "body")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _Fault("body.model must be a string", "invalid_model", "body.model")
    try:
        check_model(model)
    except ApiError as error:
        raise _Fault(error.message, error.code or "model_not_found", "body.model") from None
    return custom_id
