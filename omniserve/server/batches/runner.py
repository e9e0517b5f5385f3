"""The work on batches: become the owner, validate, run and finalize until the ownership is lost, and so on.

Everything that blocks runs in threads: one for lines, one for whole batches and their files, one for the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, NoReturn

from omniserve.server.batches.database import Row, StorageError
from omniserve.server.batches.endpoints import ENDPOINTS
from omniserve.server.batches.line_worker import LineWorker, OneThread
from omniserve.server.batches.lines import check_file, not_run_text
from omniserve.server.batches.locks import make_lock
from omniserve.server.batches.owner import NotOwner, Owner
from omniserve.server.batches.store import NewFile, Store
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

# A change by another server is seen after so many seconds; one by a client of this server is seen at once.
_POLL_S = 1.0
# A loop goes on so many seconds after an error.
_RETRY_S = 5.0
_SWEEP_EVERY_S = 600.0
# An owner that has not proved its lock for so many seconds stops its lines.
_PROOF_S = 10.0
_LINES_PER_READ = 500


class BatchRunner:
    """Works on the batches of a store until stopped, whenever this server is their owner."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self._store = store
        self._lock = make_lock(store.database, service.model_name)
        self._lock_thread, self._files_thread = OneThread("batch-lock"), OneThread("batch-files")
        self._changed = asyncio.Event()
        """Set when there may be batches to validate or finalize."""
        self._lines: LineWorker | None = None
        """The worker on lines; None while this server is not the owner."""
        self._is_waiting = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(_forever(self._take_and_work))

    async def stop(self) -> None:
        """Stop what is not done, for this server's next start or another server, and close the database."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._lock_thread.run(self._lock.release)
        await self._lock_thread.stop()
        await self._files_thread.stop()
        self._store.database.close()

    def notice(self) -> None:
        """Look at the batches now: one was created or cancelled."""
        self._changed.set()

    async def drop_batch(self, batch_id: str) -> None:
        """Stop the lines of a batch that was ended."""
        if self._lines is not None:
            await self._lines.drop(batch_id)
        self.notice()

    async def _take_and_work(self) -> None:
        model = self._service.model_name
        owner = await self._lock_thread.run(Owner.take, self._store.database, self._lock, model)
        if owner is None:
            if not self._is_waiting:
                logger.info("batches: another server runs the lines for %r; this one takes over when it ends", model)
            self._is_waiting = True
            await asyncio.sleep(_POLL_S)
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
        lines = LineWorker(self._service, self._store.files, owner, self._changed)
        swept_s = -_SWEEP_EVERY_S

        async def work_on_lines() -> None:
            lines.changed.clear()
            await lines.work()
            await _set_or_polled(lines.changed)

        async def work_on_batches() -> None:
            self._changed.clear()
            if await self._work_on_batch(owner):
                lines.changed.set()
            else:
                await _set_or_polled(self._changed)

        async def watch() -> None:
            nonlocal swept_s
            await lines.watch()
            if time.monotonic() - swept_s > _SWEEP_EVERY_S:
                swept_s = time.monotonic()
                await self._files_thread.run(self._store.sweep)
            await asyncio.sleep(_POLL_S)

        self._lines = lines
        steps = [_forever(step) for step in (work_on_lines, work_on_batches, watch)]
        loops = [asyncio.create_task(step) for step in (*steps, self._prove(owner))]
        try:
            ended, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in ended:
                loop.result()
        finally:
            self._lines = None
            for loop in loops:
                loop.cancel()
            await lines.drop()  # first: the rest may have to wait for the database
            await asyncio.gather(*loops, return_exceptions=True)
            try:
                await lines.stop()
            except (StorageError, NotOwner) as error:
                logger.warning("batches: %s; lines that were done now are run again", error)
            await self._files_thread.run(lambda: None)  # after a file that is just read or written: seconds at most

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
            await asyncio.sleep(_POLL_S)

    async def _work_on_batch(self, owner: Owner) -> bool:
        """Validate or finalize a batch; False if there is none."""
        batch = await self._files_thread.run(owner.next_batch)
        if batch is None:
            return False
        try:
            await self._files_thread.run(self._validate_or_finish, owner, batch)
        except NotOwner:
            raise
        except Exception as error:
            if isinstance(error, StorageError):
                problem = error.message
                logger.warning("batches: %s is held up: %s", batch["id"], problem)
            else:
                problem = f"internal error ({type(error).__name__}); see the server's log"
                logger.exception("batches: %s is held up", batch["id"])
            await self._files_thread.run(owner.put_off, batch["id"], problem)
        return True

    def _validate_or_finish(self, owner: Owner, batch: Row) -> None:
        if batch["status"] != "validating":
            finish(self._store, owner, batch)
            return
        input_file = self._store.file(batch["input_file_id"])
        max_lines = self._service.limits.batch_max_lines
        with self._store.files.path(input_file["id"], input_file["num_bytes"]).open("rb") as file:
            check_model = partial(ENDPOINTS[batch["endpoint"]].check_model, self._service)
            found = check_file(file, batch["endpoint"], check_model, max_lines, self._service.unknown_fields)
        if found.faults:
            owner.fail_batch(batch["id"], found.faults)
        else:
            owner.accept_lines(batch["id"], found.lines)


def finish(store: Store, owner: Owner, batch: Row) -> bool:
    """Write a batch's answers and errors, each in the order of the input, and end it. There is no file without lines.

    The files are new ones each time: an owner that comes too late, or does it again after a crash, cannot touch what
    was given out.

    Returns:
        False if another owner has ended the batch.

    Raises:
        StorageError: Disk or database do not work.
        NotOwner: There is a new owner.
    """
    written: dict[bool, NewFile] = {}
    finished = False
    try:
        for ok, kind in ((True, "output"), (False, "error")):
            if batch["completed"] if ok else batch["failed"]:
                new = NewFile(
                    filename=f"{batch['id']}_{kind}.jsonl",
                    purpose="batch_output",
                    expires_after_s=batch["outputs_expire_after_s"],
                    caller=batch["caller"],
                )
                written[ok] = store.write_file(new, _texts(owner, batch, ok))
        finished = owner.finish_batch(batch["id"], written.get(True), written.get(False))
    finally:
        if not finished:
            store.discard(*(file.id for file in written.values()))
    return finished


def _texts(owner: Owner, batch: Row, ok: bool) -> Iterator[bytes]:
    after, num_lines = 0, 0
    while rows := owner.results(batch["id"], after, _LINES_PER_READ):
        for row in rows:
            if row["ok"] is ok:
                num_lines += 1
                text = row["result"] or not_run_text(row["custom_id"], batch["outcome"])
                yield text.encode() + b"\n"
        after = rows[-1]["number"]
    expected = batch["completed"] if ok else batch["failed"]
    if num_lines != expected:
        raise StorageError(
            f"the database has {num_lines} of {expected} results of the batch {batch['id']}: another server has ended "
            "it in the meantime, or the database is damaged",
            status=500,
            code="storage_damaged",
        )


async def _forever(step: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
    """Do a step again and again until cancelled; after an error, which is logged, a little later.

    Raises:
        NotOwner: The step found that this server is not the owner any more.
    """
    while True:
        try:
            await step()
        except NotOwner:
            raise
        except Exception as error:
            if isinstance(error, StorageError):
                logger.warning("batches: %s; trying again in %g s", error, _RETRY_S)
            else:
                logger.exception("batches: unexpected; trying again in %g s", _RETRY_S)
            await asyncio.sleep(_RETRY_S)


async def _set_or_polled(changed: asyncio.Event) -> None:
    """Wait until there is something to look at, or it is time to look at what others did."""
    with contextlib.suppress(TimeoutError):
        # Not wait_for, which before Python 3.12 forgets that it was cancelled if the event comes at the same time.
        async with asyncio.timeout(_POLL_S):
            await changed.wait()
