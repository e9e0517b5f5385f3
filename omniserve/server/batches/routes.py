"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Message

from omniserve.server import openapi
from omniserve.server.answers import ENDPOINTS
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.files import told
from omniserve.server.batches.leftovers import NewFile
from omniserve.server.batches.line_run import ESCALATED_TIER
from omniserve.server.batches.lines import NO_TEXT
from omniserve.server.batches.objects import batch_object, file_object, page_object
from omniserve.server.batches.runner import BatchRunner
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.store import NewBatch, Storage
from omniserve.server.errors import ApiError
from omniserve.server.limits import caller_of
from omniserve.server.openapi import STORAGE_ERRORS, answers, asks, takes
from omniserve.server.protocol import read_fields
from omniserve.server.service import Service

_STRICT = ConfigDict(extra="forbid", strict=True)
# What a form may have around the file itself.
_FORM_BYTES = 1 << 16
_COPY_BYTES = 1 << 20
_MAX_METADATA = 16
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400


class ExpiresAfter(BaseModel):
    """The time after its upload at which a file is removed."""

    model_config = _STRICT

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 86400)


class UploadFields(BaseModel):
    """The fields of an upload's form beside the file."""

    model_config = _STRICT

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileQuery(BaseModel):
    """The query of a list of files."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = Field(None, pattern=r"^[\w-]+$")


class CreateBatch(BaseModel):
    """Body of POST /v1/batches."""

    model_config = _STRICT

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


def router(storage: Storage, runner: BatchRunner, settings: BatchSettings, service: Service) -> APIRouter:
    """Return the routes. Where API keys are asked for, each key's files and batches are its own.

    Args:
        storage: Has the files and batches.
        runner: Is told of what clients change.
        settings: Its limits.
        service: What the lines are for.
    """
    api, store, files = APIRouter(prefix="/v1"), storage.store, storage.files

    @api.post(
        "/files",
        openapi_extra=takes(openapi.Upload, "multipart/form-data"),
        responses=answers(openapi.File, 408, 413, 429, *STORAGE_ERRORS),
    )
    async def upload(request: Request) -> Response:
        caller = caller_of(request)
        caller.admit()
        async with _form(request, settings.max_file_bytes, service.limits.stall_timeout_s) as form:
            file, fields = form.get("file"), _nested({name: value for name, value in form.items() if name != "file"})
            if not isinstance(file, UploadFile):
                raise ApiError(
                    "the form has no file in its field 'file'", param="file", code="missing_required_parameter"
                )
            wanted = _checked(UploadFields, fields)
            filename = file.filename or "upload.jsonl"
            if NO_TEXT.search(filename):
                raise ApiError(
                    f"the file's name {filename!r} is no text; rename it", param="file", code="invalid_value"
                )
            file_id, num_bytes = await run_in_threadpool(storage.write_file, _parts(file.file))
        new = NewFile(
            id=file_id,
            filename=filename,
            purpose=wanted.purpose,
            num_bytes=num_bytes,
            expires_after_s=None if wanted.expires_after is None else wanted.expires_after.seconds,
            caller=caller.name,
        )
        try:
            return JSONResponse(file_object(await run_in_threadpool(store.add_file, new)))
        except StorageError:
            await run_in_threadpool(storage.discard, file_id)
            raise

    @api.get("/files", openapi_extra=asks(FileQuery), responses=answers(openapi.FilePage, *STORAGE_ERRORS))
    async def list_files(request: Request) -> Response:
        query = _checked(FileQuery, dict(request.query_params))
        page = await run_in_threadpool(
            lambda: store.list_files(
                limit=query.limit,
                after=query.after,
                newest_first=query.order == "desc",
                purpose=query.purpose,
                caller=caller_of(request).name,
            )
        )
        return JSONResponse(page_object(page, file_object))

    @api.get("/files/{file_id}", responses=answers(openapi.File, *STORAGE_ERRORS))
    async def one_file(request: Request, file_id: str) -> Response:
        return JSONResponse(file_object(await run_in_threadpool(store.file, file_id, caller_of(request).name)))

    @api.get(
        "/files/{file_id}/content",
        response_class=FileResponse,
        responses=answers(None, *STORAGE_ERRORS, media_type="application/octet-stream"),
    )
    async def content(request: Request, file_id: str) -> Response:
        row = await run_in_threadpool(store.file, file_id, caller_of(request).name)
        path = await run_in_threadpool(files.path, row["id"], row["num_bytes"])
        return FileResponse(path, media_type="application/octet-stream", filename=row["filename"])

    @api.delete("/files/{file_id}", responses=answers(openapi.DeletedFile, 409, *STORAGE_ERRORS))
    async def delete_file(request: Request, file_id: str) -> Response:
        await run_in_threadpool(store.delete_file, file_id, caller_of(request).name)
        await run_in_threadpool(storage.discard)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @api.post(
        "/batches",
        openapi_extra=takes(CreateBatch),
        responses=answers(openapi.Batch, 408, 413, 429, *STORAGE_ERRORS),
    )
    async def create(request: Request) -> Response:
        caller = caller_of(request)
        caller.admit()
        async with service.bodies.hold(request) as body:
            wanted = _checked(CreateBatch, read_fields(body))
        if wanted.endpoint not in ENDPOINTS:
            known = " or ".join(ENDPOINTS)
            raise ApiError(f"endpoint must be {known}; got {wanted.endpoint!r}", param="endpoint", code="invalid_value")
        expires_after = wanted.output_expires_after
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
        return JSONResponse(batch_object(batch))

    @api.get("/batches", openapi_extra=asks(BatchQuery), responses=answers(openapi.BatchPage, *STORAGE_ERRORS))
    async def list_batches(request: Request) -> Response:
        query = _checked(BatchQuery, dict(request.query_params))
        page = await run_in_threadpool(
            lambda: store.list_batches(limit=query.limit, after=query.after, caller=caller_of(request).name)
        )
        return JSONResponse(page_object(page, batch_object))

    @api.get("/batches/{batch_id}", responses=answers(openapi.Batch, *STORAGE_ERRORS))
    async def one_batch(request: Request, batch_id: str) -> Response:
        return JSONResponse(batch_object(await run_in_threadpool(store.batch, batch_id, caller_of(request).name)))

    @api.post("/batches/{batch_id}/cancel", responses=answers(openapi.Batch, 409, *STORAGE_ERRORS))
    async def cancel(request: Request, batch_id: str) -> Response:
        batch = await run_in_threadpool(store.cancel_batch, batch_id, caller_of(request).name)
        await runner.drop_batch(batch_id)
        return JSONResponse(batch_object(batch))

    return api


def closed_router(error: StorageError) -> APIRouter:
    """Return routes that say why there are no files and batches."""
    api = APIRouter(prefix="/v1")

    @api.api_route("/files{_:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    @api.api_route("/batches{_:path}", methods=["GET", "POST"], include_in_schema=False)
    async def closed() -> Response:
        raise ApiError(f"this server keeps no files and batches: {error.message}", status=503, code="storage_error")

    return api


M = TypeVar("M", bound=BaseModel)


def _checked(kind: type[M], fields: Any) -> M:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ApiError(f"{path} is missing", param=path, code="missing_required_parameter") from None
        if first["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields)
            message = f"unknown field {path!r}: remove it; known fields: {known}"
            raise ApiError(message, param=path, code="unknown_parameter") from None
        message = f"{path}: {first['msg']}; got {str(first['input'])[:80]!r}"
        raise ApiError(message, param=path or None, code="invalid_value") from None


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
async def _form(request: Request, max_file_bytes: int, stall_timeout_s: float) -> AsyncIterator[FormData]:
    """Read a form; its file lies in the system's folder for temporary files.

    Raises:
        ApiError: It is none, too large, or nothing more of it came for too long.
        StorageError: There is no room for it.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(f"the body must be multipart/form-data with the file in its field 'file'; got {kind!r}")
    try:
        with told(Path(tempfile.gettempdir())):
            form = await _limited(request, max_file_bytes, stall_timeout_s).form(max_files=1, max_fields=8)
    except HTTPException as error:
        raise ApiError(f"the form cannot be read: {error.detail}", status=error.status_code) from None
    try:
        yield form
    finally:
        await form.close()


def _limited(request: Request, max_file_bytes: int, stall_timeout_s: float) -> Request:
    """Return the request, which fails once its body is larger than a form with the largest file, or stalls."""
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        try:
            async with asyncio.timeout(stall_timeout_s):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(
                f"nothing more of the file arrived for {stall_timeout_s:g} s (--limit stall_timeout_s); send it again",
                status=408,
                code="request_timeout",
            ) from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_file_bytes + _FORM_BYTES:
            limit = max_file_bytes / (1 << 20)
            raise ApiError(
                f"the file is larger than {limit:g} MiB (--limit max_file_mib); divide it", status=413, param="file"
            )
        return message

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


def _parts(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while part := file.read(_COPY_BYTES):
        yield part
