"""The work on batches as a whole: its parts, its loops and threads, and the clock.

Everything that blocks runs in threads: one for claims and results, one for whole batches and their files. Several
servers may do this on one database (see ``claims``). All that is here may be lost at any moment: what counts is in the
database.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time

from omniserve.server.batches.batch_worker import BatchWorker
from omniserve.server.batches.claims import Claims
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.hurry import Hurry
from omniserve.server.batches.leases import Leases
from omniserve.server.batches.line_worker import LineWorker
from omniserve.server.batches.loops import POLL_S, Changes, OneThread, forever
from omniserve.server.batches.rows import new_id
from omniserve.server.batches.running_lines import RunningLines
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.storage import Storage
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

_SWEEP_EVERY_S = 600.0


class BatchRunner:
    """Works on the batches of a database until stopped.

    Args:
        service: Runs the lines.
        storage: Holds them; closed by ``stop``.
        settings: How many lines at a time, and so on.
    """

    def __init__(self, service: Service, storage: Storage, settings: BatchSettings) -> None:
        self._storage = storage
        owner = f"{socket.gethostname()[:64]}-{os.getpid()}-{new_id('')}"
        self._claims = Claims(storage.database, owner=owner, model=service.model_name, lease_s=settings.lease_s)
        self._claims_thread = OneThread("batch-claims")
        self._changes = Changes()
        self._running = RunningLines(service, self._claims, self._claims_thread, self._changes)
        self._leases = Leases(self._running, self._claims, self._claims_thread)
        self._hurry = Hurry(self._running, self._claims, self._claims_thread, settings.concurrency)
        self._line_worker = LineWorker(
            service,
            storage.files,
            self._running,
            self._hurry,
            self._claims,
            self._claims_thread,
            self._changes,
            concurrency=settings.concurrency,
        )
        self._batch_worker = BatchWorker(service, storage, self._claims, self._changes, max_lines=settings.max_lines)
        self._swept_s = -_SWEEP_EVERY_S
        self._loops: list[asyncio.Task[None]] = []

    async def take_over(self) -> None:
        """Free what a process that is dead for certain had claimed, instead of waiting for its leases to end."""
        await self._claims_thread.run(self._claims.take_over)

    def start(self) -> None:
        """Begin to work."""
        self._leases.begin()
        steps = (self._line_worker.work, self._batch_worker.work, self._watch, self._leases.renew)
        self._loops = [asyncio.create_task(forever(step)) for step in steps]

    async def stop(self) -> None:
        """Give back what is not done, for this server's next start or another server."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._running.drop(list(self._running.by_key.values()))
        await self._batch_worker.stop()
        try:
            await self._running.hand_in()
            await self._claims_thread.run(self._claims.release)
        except StorageError as error:
            logger.warning("batches: %s; what runs here is free when its lease ends", error)
        await self._claims_thread.stop()
        self._storage.close()

    def notice(self) -> None:
        """Look at the batches now: one was created or cancelled."""
        self._changes.batches.set()

    async def drop_batch(self, batch_id: str) -> None:
        """Stop the lines of a batch that was ended."""
        running = self._running
        await running.drop([entry for entry in running.by_key.values() if entry.line.batch_id == batch_id])
        self.notice()

    async def _watch(self) -> None:
        """Look at the clock: for batches whose window is over, leases that ended, batches that are late."""
        for batch_id in await self._claims_thread.run(self._storage.progress.expire_batches):
            await self.drop_batch(batch_id)
        if await self._claims_thread.run(self._claims.free_overdue):
            self._changes.lines.set()
        now, batches = await self._claims_thread.run(self._storage.progress.running_batches, self._claims.model)
        self._hurry.judge(now, batches)
        await self._hurry.make_way()
        if time.monotonic() - self._swept_s > _SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            await self._batch_worker.sweep()
        await asyncio.sleep(POLL_S)
