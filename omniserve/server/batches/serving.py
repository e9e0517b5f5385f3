"""Batches as a part of a server: open before the engine starts, work while it serves, stop before it ends."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter

from omniserve.server.batches.database import StorageError
from omniserve.server.batches.routes import closed_router, router
from omniserve.server.batches.runner import BatchRunner
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.store import Storage
from omniserve.server.service import Service

logger = logging.getLogger(__name__)


class BatchServing:
    """The batches of one server: ``open``, ``start``, ``stop``."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._storage: Storage | StorageError = StorageError("not opened")
        self._runner: BatchRunner | None = None

    async def open(self) -> None:
        """Open the storage. If only the default place for it is unusable, the server goes without, and says so.

        Raises:
            StorageError: The place that was asked for cannot be used.
        """
        try:
            self._storage = await asyncio.to_thread(Storage.open, self._settings)
        except StorageError as error:
            if self._settings.is_explicit:
                raise
            logger.warning("no files and batches: %s", error)
            self._storage = error

    def start(self, service: Service) -> APIRouter:
        """Begin to work on batches; return the routes."""
        if isinstance(self._storage, StorageError):
            return closed_router(self._storage)
        self._runner = BatchRunner(service, self._storage, self._settings)
        self._runner.start()
        return router(self._storage, self._runner, self._settings, service)

    async def stop(self) -> None:
        """Give back what is not done, and close the storage."""
        if self._runner is not None:
            await self._runner.stop()
