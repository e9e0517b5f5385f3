"""The work on batches as a whole: become the owner, work until the ownership is lost, and so on.

Everything that blocks runs in threads: one for lines, one for whole batches and their files, one for the lock.
"""

from __future__ import annotations

import asyncio
import logging
import time

from omniserve.server.batches.batch_worker import BatchWorker
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.line_worker import LineWorker
from omniserve.server.batches.loops import POLL_S, Changes, OneThread, forever
from omniserve.server.batches.owner import NotOwner, Owner, make_lock, take
from omniserve.server.batches.progress import Progress
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.store import Storage
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

_SWEEP_EVERY_S = 600.0
_PROOF_S = 10.0
"""An owner that has not proved its lock for so long stops its lines."""


class BatchRunner:
    """Works on the batches of a database until stopped, whenever this server is their owner.

    Args:
        service: Runs the lines.
        storage: Holds them; closed by ``stop``.
        settings: How many lines at a time, and so on.
    """

    def __init__(self, service: Service, storage: Storage, settings: BatchSettings) -> None:
        self._service = service
        self._storage = storage
        self._settings = settings
        self._lock = make_lock(storage.database, service.model_name)
        self._lock_thread = OneThread("batch-lock")
        self._changes = Changes()
        self._lines: LineWorker | None = None
        """The worker on lines; None while this server is not the owner."""
        self._is_waiting = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(forever(self._take_and_work))

    async def stop(self) -> None:
        """Stop what is not done, for this server's next start or another server."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._lock_thread.run(self._lock.release)
        await self._lock_thread.stop()
        self._storage.close()

    def notice(self) -> None:
        """Look at the batches now: one was created or cancelled."""
        self._changes.batches.set()

    async def drop_batch(self, batch_id: str) -> None:
        """Stop the lines of a batch that was ended."""
        if self._lines is not None:
            await self._lines.drop_batch(batch_id)
        self.notice()

    async def _take_and_work(self) -> None:
        model = self._service.model_name
        owner = await self._lock_thread.run(take, self._storage.database, self._lock, model)
        if owner is None:
            if not self._is_waiting:
                logger.info("batches: another server runs the lines for %r; this one takes over when it ends", model)
            self._is_waiting = True
            await asyncio.sleep(POLL_S)
            return
        if self._is_waiting:
            logger.info("batches: this server takes over the lines for %r", model)
        self._is_waiting = False
        try:
            await self._work(owner)
        except NotOwner as error:
            logger.warning("batches: %s; this server has stopped its lines", error)
        finally:
            await self._lock_thread.run(self._lock.release)

    async def _work(self, owner: Owner) -> None:
        """Work until there is an error that says that this server is not the owner."""
        progress = Progress(owner)
        lines = LineWorker(
            self._service, self._storage.files, progress, self._changes, concurrency=self._settings.concurrency
        )
        batches = BatchWorker(self._service, self._storage, progress, self._changes, max_lines=self._settings.max_lines)
        swept_s = -_SWEEP_EVERY_S

        async def watch() -> None:
            nonlocal swept_s
            await lines.watch()
            if time.monotonic() - swept_s > _SWEEP_EVERY_S:
                swept_s = time.monotonic()
                await batches.sweep()
            await asyncio.sleep(POLL_S)

        self._lines = lines
        steps = [forever(step) for step in (lines.work, batches.work, watch)]
        loops = [asyncio.create_task(step) for step in (*steps, self._prove(owner))]
        try:
            ended, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in ended:
                loop.result()
        finally:
            self._lines = None
            for loop in loops:
                loop.cancel()
            await lines.drop_all()  # first: the rest may have to wait for the database
            await asyncio.gather(*loops, return_exceptions=True)
            try:
                await lines.stop()
            except (StorageError, NotOwner) as error:
                logger.warning("batches: %s; lines that were done now are run again", error)
            await batches.stop()

    async def _prove(self, owner: Owner) -> None:
        """Prove again and again that this server is the owner.

        Raises:
            NotOwner: It is not, or cannot prove it.
        """
        proved_s = time.monotonic()
        while True:
            started_s = time.monotonic()
            proving = asyncio.ensure_future(self._lock_thread.run(owner.prove))
            await asyncio.wait([proving], timeout=max(0.0, proved_s + _PROOF_S - started_s))
            try:
                if proving.done():
                    proving.result()
                    proved_s = started_s
                reason = "the database does not answer"
            except StorageError as error:
                reason = error.message
            if not proving.done() or time.monotonic() - proved_s >= _PROOF_S:
                raise NotOwner(f"the lock could not be proved for {_PROOF_S:g} s ({reason})")
            await asyncio.sleep(POLL_S)
