"""The work on whole batches: check their inputs, write their results, remove the files that nobody knows."""

from __future__ import annotations

import logging
import os

from omniserve.server.batches.claims import Claims
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.lines import CheckedFile, check_file
from omniserve.server.batches.loops import RETRY_S, Changes, OneThread, set_or_polled
from omniserve.server.batches.outputs import finish
from omniserve.server.batches.rows import Row
from omniserve.server.batches.storage import Storage
from omniserve.server.service import Service

logger = logging.getLogger(__name__)


class BatchWorker:
    """Validates and finalizes batches, one at a time.

    Args:
        service: Knows the model that is served; batches for others are not validated here.
        storage: Holds them.
        claims: Says who owns them here, and for how long.
        changes: Says when to look again; told of lines that may be run.
        max_lines: Of a batch.
    """

    def __init__(self, service: Service, storage: Storage, claims: Claims, changes: Changes, *, max_lines: int) -> None:
        self._service = service
        self._storage = storage
        self._claims = claims
        self._changes = changes
        self._max_lines = max_lines
        self._thread = OneThread("batch-files")

    async def work(self) -> None:
        """Work on a batch; without one, wait until there may be one.

        Raises:
            StorageError: The database does not work.
        """
        self._changes.batches.clear()
        progress, owner = self._storage.progress, self._claims.owner
        batch = await self._thread.run(progress.claim_batch, owner, self._claims.model, self._claims.lease_s)
        if batch is None:
            await set_or_polled(self._changes.batches)
            return
        try:
            if batch["status"] == "validating":
                await self._thread.run(self._validate, batch)
            else:
                await self._thread.run(finish, self._storage, batch, owner)
        except StorageError as error:
            logger.warning("batches: %s is held up: %s", batch["id"], error)
            await self._thread.run(progress.postpone_batch, batch["id"], owner, error.message, 2 * RETRY_S)
        except Exception as error:
            logger.exception("batches: %s is held up", batch["id"])
            problem = f"internal error ({type(error).__name__}); see the server's log"
            await self._thread.run(progress.postpone_batch, batch["id"], owner, problem, 2 * RETRY_S)
        self._changes.lines.set()

    async def sweep(self) -> None:
        """Forget files whose time is over, and remove those that are nobody's.

        Raises:
            StorageError: Disk or database do not work.
        """
        await self._thread.run(self._sweep)

    async def stop(self) -> None:
        """Wait for a file that is just read or written: seconds at most."""
        await self._thread.stop()

    def _validate(self, batch: Row) -> None:
        file = self._storage.store.file(batch["input_file_id"])
        found = self._check(self._storage.files.path(file["id"], file["num_bytes"]), batch["endpoint"])
        if found.faults:
            self._storage.progress.fail_batch(batch["id"], self._claims.owner, found.faults)
        else:
            self._storage.progress.accept_lines(batch["id"], self._claims.owner, found.lines)

    def _check(self, path: os.PathLike[str], endpoint: str) -> CheckedFile:
        with open(path, "rb") as file:
            return check_file(file, endpoint, self._service.check_model, self._max_lines)

    def _sweep(self) -> None:
        self._storage.leftovers.forget_expired()
        self._storage.sweep()
        self._storage.files.remove_abandoned()
