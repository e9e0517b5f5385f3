"""LoRA adapters behind the API: the names that requests may give as their model, and the calls that load and unload.

The calls are vLLM's. They take folders inside those that the server was started with (``--lora-dir``), from holders of
keys with ``admin: true``, or from anyone if the server asks for no keys. Adapters that are named at the start are
loaded likewise. All are loaded again when the engine is started again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from omniserve.server.access.limits import BodyReader, caller_of, take_body
from omniserve.server.errors import ApiError
from omniserve.server.fields import StrictModel, UnknownFields, ignored_header, read_fields, validate
from omniserve.server.openapi import answers, takes

if TYPE_CHECKING:
    from omniserve.server.engines.client import EngineClient
    from omniserve.server.engines.fleet import Fleet

logger = logging.getLogger(__name__)

_ERRORS = (400, 403, 404, 408, 413, 429, 500)


class Engines(Protocol):
    """An engine, or several."""

    async def change_lora(self, name: str, folder: str | None) -> None:
        """Load a LoRA adapter from a folder, or unload it if that is None.

        Raises:
            ApiError: An engine refuses, or is gone.
        """


@dataclass(frozen=True, slots=True)
class ServedLoRA:
    """An adapter that requests can name."""

    folder: str
    created: int
    """When it was loaded, in seconds since 1970."""


class LoRAModels:
    """The adapters of a server, by name, beside its base model.

    Args:
        bases: The names of the model.
        folders: Folders from which calls may load.
    """

    def __init__(self, bases: Sequence[str], folders: Iterable[Path] = ()) -> None:
        self._bases = bases
        self._folders = [folder.resolve() for folder in folders]
        self.served: dict[str, ServedLoRA] = {}
        """The adapters by name."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when there is another one, or one less."""
        self._changing = asyncio.Lock()

    @property
    def may_load(self) -> bool:
        """There are folders to load adapters from."""
        return bool(self._folders)

    def named_by(self, model: str) -> str | None:
        """Return the adapter that a model's name stands for, its own or ``BASE:NAME``; None: there is none."""
        names = [model, *(model.removeprefix(f"{base}:") for base in self._bases)]
        return next((each for each in names if each in self.served), None)

    def cards(self) -> list[dict[str, Any]]:
        """Return the objects of /v1/models."""
        return [
            {
                "id": name, "object": "model", "created": served.created, "owned_by": "omniserve",
                "root": served.folder, "parent": self._bases[0],
            }
            for name, served in self.served.items()
        ]  # fmt: skip

    async def load_from(self, client: Engines, name: str, path: str, *, replaces: bool) -> None:
        """Load an adapter from one of the folders for calls, as ``load`` does.

        Raises:
            ApiError: It is in none of them; or as ``load``.
        """
        await self.load(client, name, str(self._checked(path)), replaces=replaces)

    async def load(self, client: Engines, name: str, folder: str, *, replaces: bool = False) -> None:
        """Load an adapter; return when requests can name it.

        Raises:
            ApiError: Its name is taken, or the engine refuses it.
        """
        if any(name == base or name.startswith(f"{base}:") for base in self._bases):
            raise ApiError(f"{name!r} is a name of the base model; choose another", param="lora_name")
        async with self._changing:
            if name in self.served and not replaces:
                raise ApiError(
                    f"the LoRA adapter {name!r} is loaded already; unload it first, or set load_inplace to true",
                    param="lora_name",
                )
            await client.change_lora(name, folder)
            self.served[name] = ServedLoRA(folder, int(time.time()))
            self.on_change()
        logger.info("loaded the LoRA adapter %s from %s", name, folder)

    async def unload(self, client: Engines, name: str) -> None:
        """Let no new request name an adapter; those that have go on.

        Raises:
            ApiError: There is none of this name.
        """
        async with self._changing:
            if name not in self.served:
                raise ApiError(f"there is no LoRA adapter {name!r}", status=404, param="lora_name", code="not_found")
            await client.change_lora(name, None)
            del self.served[name]
            self.on_change()
        logger.info("unloaded the LoRA adapter %s", name)

    async def restore(self, fleet: Fleet, client: EngineClient) -> None:
        """Load all adapters in an engine that was started again, or joins; those that no engine has any more are gone.

        Raises:
            ApiError: It has ended.
        """
        async with self._changing:
            for name, served in list(self.served.items()):
                try:
                    await client.change_lora(name, served.folder)
                except ApiError as error:
                    if error.status != HTTPStatus.BAD_REQUEST:  # the engine has ended again
                        raise
                    logger.error("an engine that was started again has no LoRA adapter %s: %s", name, error.message)
                    client.refused_loras.add(name)
                    if not fleet.has_lora(name, beside=client):
                        self._forget(name)

    def _forget(self, name: str) -> None:
        del self.served[name]
        self.on_change()
        logger.error("the LoRA adapter %s is gone with the engine", name)

    def _checked(self, path: str) -> Path:
        """Return the folder that a path names, symbolic links followed.

        Raises:
            ApiError: It is in none of the folders for adapters, or is none.
        """
        for folder in self._folders:
            try:
                found = (folder / path).resolve()  # an absolute path stays what it is
                if found.is_relative_to(folder) and found.is_dir():
                    return found
            except (OSError, ValueError):  # a name that no file can have
                break
        raise ApiError(
            f"lora_path {path!r} is no folder in one that adapters may be loaded from; those are given to the server "
            "as --lora-dir",
            param="lora_path",
        )


class LoadLoRARequest(StrictModel):
    """Body of /v1/load_lora_adapter, as of vLLM."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    """Replace an adapter of this name, for new requests."""


class UnloadLoRARequest(StrictModel):
    """Body of /v1/unload_lora_adapter, as of vLLM."""

    lora_name: str = Field(min_length=1, max_length=256)


def router(models: LoRAModels, engine: Engines, bodies: BodyReader, unknown_fields: UnknownFields) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    def check_admin(http: Request) -> None:
        if not models.may_load:
            raise ApiError(
                "adapters are not loaded by calls here: the server was started without --lora-dir", status=403
            )
        if not caller_of(http).is_admin:
            raise ApiError("only keys with 'admin: true' in the key file may load and unload adapters", status=403)

    async def fields(http: Request, kind: type[Any]) -> Any:
        async with take_body(http, bodies) as body:
            return validate(kind, read_fields(body), unknown_fields)

    @routes.post(
        "/v1/load_lora_adapter",
        openapi_extra=takes(LoadLoRARequest),
        responses=answers(None, *_ERRORS, media_type="text/plain"),
    )
    async def load(http: Request) -> Response:
        check_admin(http)
        request: LoadLoRARequest = await fields(http, LoadLoRARequest)
        await models.load_from(engine, request.lora_name, request.lora_path, replaces=request.load_inplace)
        text = f"Success: LoRA adapter '{request.lora_name}' added successfully."
        return PlainTextResponse(text, headers=ignored_header(request))

    @routes.post(
        "/v1/unload_lora_adapter",
        openapi_extra=takes(UnloadLoRARequest),
        responses=answers(None, *_ERRORS, media_type="text/plain"),
    )
    async def unload(http: Request) -> Response:
        check_admin(http)
        request: UnloadLoRARequest = await fields(http, UnloadLoRARequest)
        await models.unload(engine, request.lora_name)
        text = f"Success: LoRA adapter '{request.lora_name}' removed successfully."
        return PlainTextResponse(text, headers=ignored_header(request))

    return routes
