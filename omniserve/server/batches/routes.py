"""/v1/files and /v1/batches: a server's part in them, from its start to its stop, and OpenAI's objects."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Message

from omniserve.server import openapi
from omniserve.server.access.limits import MIB, Limits, caller_of, take_body
from omniserve.server.batches.database import BATCHES, FILES, TIMED_STATUSES, Database, Row, StorageError
from omniserve.server.batches.endpoints import ENDPOINTS
from omniserve.server.batches.files import BatchSettings, read_parts, storage_errors
from omniserve.server.batches.lines import ESCALATED_TIER, NO_TEXT
from omniserve.server.batches.runner import BatchRunner
from omniserve.server.batches.store import NewBatch, NewFile, Page, Store
from omniserve.server.errors import ApiError
from omniserve.server.fields import StrictModel, ignored_header, read_fields, validate
from omniserve.server.openapi import STORAGE_ERRORS, answers, asks, takes
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

# What a form may have around the file itself.
_FORM_BYTES = 1 << 16
_MAX_METADATA = 16
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400


class BatchServing:
    """The batches of one server: open before the engine starts, work while it serves, stop before it ends."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._store: Store | StorageError = StorageError("not opened")
        self._runner: BatchRunner | None = None

    async def open(self) -> None:
        """Open the store. If only the default place for it is unusable, the server goes without, and says so.

        Raises:
            StorageError: The place that was asked for cannot be used.
        """
        try:
            self._store = await asyncio.to_thread(Store.open, self._settings)
        except StorageError as error:
            if self._settings.is_explicit:
                raise
            logger.warning("no files and batches: %s", error)
            self._store = error

    @property
    def database(self) -> Database | None:
        """The database, once it is open; None: there is none."""
        return None if isinstance(self._store, StorageError) else self._store.database

    def start(self, service: Service) -> APIRouter:
        """Begin to work on batches; return the routes."""
        if isinstance(self._store, StorageError):
            return _closed_router(self._store)
        self._runner = BatchRunner(service, self._store)
        self._runner.start()
        return _router(self._store, self._runner, service)

    async def stop(self) -> None:
        """Give back what is not done, and close the store."""
        if self._runner is not None:
            await self._runner.stop()


class ExpiresAfter(StrictModel):
    """The time after its upload at which a file is removed."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 86400)


class UploadFields(StrictModel):
    """The fields of an upload's form beside the file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileQuery(BaseModel):
    """The query of a list of files."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = Field(None, pattern=r"^[\w-]+$")


class CreateBatch(StrictModel):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
            Field(max_length=_MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(BaseModel):
    """The query of a list of batches."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)


def _router(store: Store, runner: BatchRunner, service: Service) -> APIRouter:
    """Return the routes. Where API keys are asked for, each key's files and batches are its own."""
    api = APIRouter(prefix="/v1")

    @api.post(
        "/files",
        openapi_extra=takes(openapi.Upload, "multipart/form-data"),
        responses=answers(openapi.File, 408, 413, 429, *STORAGE_ERRORS),
    )
    async def upload(request: Request) -> Response:
        caller = caller_of(request)
        await caller.enter()
        async with _form(request, service.limits) as form:
            file, fields = form.get("file"), _nested({name: value for name, value in form.items() if name != "file"})
            if not isinstance(file, UploadFile):
                message = "the form has no file in its field 'file'"
                raise ApiError(message, param="file", code="missing_required_parameter")
            wanted = validate(UploadFields, fields, service.unknown_fields)
            filename = file.filename or "upload.jsonl"
            if NO_TEXT.search(filename):
                message = f"the file's name {filename!r} is no text; rename it"
                raise ApiError(message, param="file", code="invalid_value")
            new = NewFile(
                filename=filename,
                purpose=wanted.purpose,
                expires_after_s=None if wanted.expires_after is None else wanted.expires_after.seconds,
                caller=caller.name,
            )
            await file.seek(0)
            added = await run_in_threadpool(store.add_file, new, read_parts(file.file))
            return JSONResponse(file_object(added), headers=ignored_header(wanted))

    @api.get("/files", openapi_extra=asks(FileQuery), responses=answers(openapi.FilePage, *STORAGE_ERRORS))
    def list_files(request: Request) -> Response:
        query = validate(FileQuery, dict(request.query_params), service.unknown_fields)
        page = store.page(
            FILES,
            limit=query.limit,
            after=query.after,
            newest_first=query.order == "desc",
            purpose=query.purpose,
            caller=caller_of(request).name,
        )
        return JSONResponse(_page_object(page, file_object))

    @api.get("/files/{file_id}", responses=answers(openapi.File, *STORAGE_ERRORS))
    def one_file(request: Request, file_id: str) -> Response:
        return JSONResponse(file_object(store.file(file_id, caller_of(request).name)))

    @api.get(
        "/files/{file_id}/content",
        response_class=FileResponse,
        responses=answers(None, *STORAGE_ERRORS, media_type="application/octet-stream"),
    )
    def content(request: Request, file_id: str) -> Response:
        row = store.file(file_id, caller_of(request).name)
        path = store.files.path(row["id"], row["num_bytes"])
        return FileResponse(path, media_type="application/octet-stream", filename=row["filename"])

    @api.delete("/files/{file_id}", responses=answers(openapi.DeletedFile, 409, *STORAGE_ERRORS))
    def delete_file(request: Request, file_id: str) -> Response:
        store.delete_file(file_id, caller_of(request).name)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @api.post(
        "/batches", openapi_extra=takes(CreateBatch), responses=answers(openapi.Batch, 408, 413, 429, *STORAGE_ERRORS)
    )
    async def create(request: Request) -> Response:
        async with take_body(request, service.bodies) as body:
            wanted = validate(CreateBatch, read_fields(body), service.unknown_fields)
        if wanted.endpoint not in ENDPOINTS:
            known = " or ".join(ENDPOINTS)
            raise ApiError(f"endpoint must be {known}; got {wanted.endpoint!r}", param="endpoint", code="invalid_value")
        caller, expires_after = caller_of(request), wanted.output_expires_after
        new = NewBatch(
            model=service.model_name,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            window_s=_window_s(wanted.completion_window),
            metadata=wanted.metadata,
            outputs_expire_after_s=None if expires_after is None else expires_after.seconds,
            caller=caller.name,
            may_escalate=caller.reaches(ESCALATED_TIER, service.info.classes),
        )
        batch = await run_in_threadpool(store.create_batch, new)
        runner.notice()
        return JSONResponse(batch_object(batch), headers=ignored_header(wanted))

    @api.get("/batches", openapi_extra=asks(BatchQuery), responses=answers(openapi.BatchPage, *STORAGE_ERRORS))
    def list_batches(request: Request) -> Response:
        query = validate(BatchQuery, dict(request.query_params), service.unknown_fields)
        page = store.page(BATCHES, limit=query.limit, after=query.after, caller=caller_of(request).name)
        return JSONResponse(_page_object(page, batch_object))

    @api.get("/batches/{batch_id}", responses=answers(openapi.Batch, *STORAGE_ERRORS))
    def one_batch(request: Request, batch_id: str) -> Response:
        return JSONResponse(batch_object(store.batch(batch_id, caller_of(request).name)))

    @api.post("/batches/{batch_id}/cancel", responses=answers(openapi.Batch, 409, *STORAGE_ERRORS))
    async def cancel(request: Request, batch_id: str) -> Response:
        batch = await run_in_threadpool(store.cancel_batch, batch_id, caller_of(request).name)
        await runner.drop_batch(batch_id)
        return JSONResponse(batch_object(batch))

    return api


def _closed_router(error: StorageError) -> APIRouter:
    """Return routes that say why there are no files and batches."""
    api = APIRouter(prefix="/v1")

    @api.api_route("/files{_:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    @api.api_route("/batches{_:path}", methods=["GET", "POST"], include_in_schema=False)
    async def closed() -> Response:
        raise ApiError(f"this server keeps no files and batches: {error.message}", status=503, code="storage_error")

    return api


def file_object(row: Row) -> dict[str, Any]:
    """Return a file as clients see it."""
    return {
        "object": "file",
        **{name: row[name] for name in ("id", "filename", "purpose")},
        "bytes": row["num_bytes"],
        "created_at": int(row["created_at"]),
        "expires_at": _seconds(row["expires_at"]),
        "status": "processed",
    }


_SHOWN = ("id", "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id")


def batch_object(row: Row) -> dict[str, Any]:
    """Return a batch as clients see it; what OpenAI has no word for is under ``omniserve``."""
    faults = None if row["errors"] is None else {"object": "list", "data": json.loads(row["errors"])}
    return {
        "object": "batch",
        **{name: row[name] for name in _SHOWN},
        "errors": faults,
        **{f"{name}_at": _seconds(row[f"{name}_at"]) for name in ("created", "expires", *TIMED_STATUSES)},
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
        "usage": {
            "input_tokens": row["input_tokens"],
            "input_tokens_details": {"cached_tokens": row["cached_tokens"]},
            "output_tokens": row["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": row["input_tokens"] + row["output_tokens"],
        },
        "metadata": None if row["user_metadata"] is None else json.loads(row["user_metadata"]),
        "omniserve": {name: row[name] for name in ("escalated", "problem")},
    }


def _page_object(page: Page, shape: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    data = [shape(row) for row in page.rows]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": page.has_more, **ends}


def _seconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)


def _window_s(window: str) -> float:
    match = re.fullmatch(r"([1-9]\d{0,6})([smhd])", window)
    seconds = 0 if match is None else int(match[1]) * _UNITS_S[match[2]]
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise ApiError(
            f"completion_window must be a number and s, m, h or d, like '24h', up to '30d'; got {window!r}",
            param="completion_window",
            code="invalid_value",
        )
    return seconds


@asynccontextmanager
async def _form(request: Request, limits: Limits) -> AsyncIterator[FormData]:
    """Read a form; its file lies in the system's folder for temporary files.

    Raises:
        ApiError: It is none, too large, or nothing more of it came for too long.
        StorageError: There is no room for it.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(f"the body must be multipart/form-data with the file in its field 'file'; got {kind!r}")
    try:
        with storage_errors(Path(tempfile.gettempdir())):
            form = await _limited(request, limits).form(max_files=1, max_fields=8)
    except HTTPException as error:
        raise ApiError(f"the form cannot be read: {error.detail}", status=error.status_code) from None
    try:
        yield form
    finally:
        await form.close()


def _limited(request: Request, limits: Limits) -> Request:
    """Return the request, which fails once its body is larger than a form with the largest file, or stalls."""
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        try:
            async with asyncio.timeout(limits.stall_timeout_s):
                received = await request.receive()
        except TimeoutError:
            waited = f"{limits.stall_timeout_s:g} s (--limit stall_timeout_s)"
            message = f"nothing more of the file arrived for {waited}; send it again"
            raise ApiError(message, status=408, code="request_timeout") from None
        num_bytes += len(received.get("body", b""))
        if num_bytes > limits.max_file_mib * MIB + _FORM_BYTES:
            message = f"the file is larger than {limits.max_file_mib:g} MiB (--limit max_file_mib); divide it"
            raise ApiError(message, status=413, param="file")
        return received

    return Request(request.scope, receive)


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a form's fields with ``name[key]`` as a dictionary ``name``; numbers in there become int."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        if match := re.fullmatch(r"(\w+)\[(\w+)\]", name):
            value = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,15}", value) else value
            inner = nested.setdefault(match[1], {})
            if isinstance(inner, dict):
                inner[match[2]] = value
        else:
            nested[name] = value
    return nested
