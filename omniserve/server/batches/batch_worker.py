"""The work on whole batches: check their inputs, write their results, remove the files that no row names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

from omniserve.server.batches.database import StorageError
from omniserve.server.batches.leftovers import NewFile
from omniserve.server.batches.line_run import not_run_text
from omniserve.server.batches.lines import CheckedFile, check_file
from omniserve.server.batches.loops import RETRY_S, Changes, OneThread, set_or_polled
from omniserve.server.batches.owner import NotOwner
from omniserve.server.batches.progress import Progress
from omniserve.server.batches.store import Row, Storage
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

_LINES_PER_READ = 500


class BatchWorker:
    """Validates and finalizes batches, one at a time.

    Args:
        service: Knows the model that is served.
        storage: Holds the batches' files.
        progress: Knows what there is to do.
        changes: Says when to look again; told of lines that may be run.
        max_lines: Of a batch.
    """

    def __init__(
        self, service: Service, storage: Storage, progress: Progress, changes: Changes, *, max_lines: int
    ) -> None:
        self._service = service
        self._storage = storage
        self._progress = progress
        self._changes = changes
        self._max_lines = max_lines
        self._thread = OneThread("batch-files")
        self._put_off: dict[str, float] = {}
        """Batches that could not be worked on, and till when they are put off."""

    async def work(self) -> None:
        """Work on a batch; without one, wait until there may be one.

        Raises:
            StorageError: The database does not work.
            NotOwner: There is a new owner.
        """
        self._changes.batches.clear()
        now_s = time.monotonic()
        self._put_off = {batch_id: until_s for batch_id, until_s in self._put_off.items() if until_s > now_s}
        batch = await self._thread.run(self._progress.next_batch, list(self._put_off))
        if batch is None:
            await set_or_polled(self._changes.batches)
            return
        try:
            await self._thread.run(self._work_on, batch)
        except NotOwner:
            raise
        except Exception as error:
            if isinstance(error, StorageError):
                problem = error.message
                logger.warning("batches: %s is held up: %s", batch["id"], problem)
            else:
                problem = f"internal error ({type(error).__name__}); see the server's log"
                logger.exception("batches: %s is held up", batch["id"])
            self._put_off[batch["id"]] = time.monotonic() + 2 * RETRY_S
            await self._thread.run(self._progress.report, batch["id"], problem)
        self._changes.lines.set()

    async def sweep(self) -> None:
        """Forget files whose time is over, and remove those that no row names.

        Raises:
            StorageError: Disk or database do not work.
        """
        await self._thread.run(self._sweep)

    async def stop(self) -> None:
        """Wait for a file that is just read or written: seconds at most."""
        await self._thread.stop()

    def _work_on(self, batch: Row) -> None:
        if batch["status"] == "validating":
            file = self._storage.store.file(batch["input_file_id"])
            found = self._check(self._storage.files.path(file["id"], file["num_bytes"]), batch["endpoint"])
            if found.faults:
                self._progress.fail_batch(batch["id"], found.faults)
            else:
                self._progress.accept_lines(batch["id"], found.lines)
        else:
            finish(self._storage, self._progress, batch)

    def _check(self, path: os.PathLike[str], endpoint: str) -> CheckedFile:
        with open(path, "rb") as file:
            return check_file(file, endpoint, self._service.check_model, self._max_lines)

    def _sweep(self) -> None:
        self._storage.leftovers.forget_expired()
        self._storage.sweep()
        self._storage.files.remove_abandoned()


def finish(storage: Storage, progress: Progress, batch: Row) -> bool:
    """Write a batch's answers and errors, each in the order of the input, and end it. There is no file without lines.

    The files are new ones each time: an owner that comes too late, or does it again after a crash, cannot touch what
    was given out.

    Returns:
        False if another owner has ended the batch.

    Raises:
        StorageError: Disk or database do not work.
        NotOwner: There is a new owner.
    """
    written: list[NewFile] = []
    finished = False
    try:
        files = {ok: _write(storage, progress, batch, ok, written) for ok in (True, False)}
        finished = progress.finish_batch(batch["id"], files[True], files[False])
    finally:
        if not finished:
            storage.discard(*(file.id for file in written))
    return finished


def _write(storage: Storage, progress: Progress, batch: Row, ok: bool, written: list[NewFile]) -> NewFile | None:
    if not (batch["completed"] if ok else batch["failed"]):
        return None
    file_id, num_bytes = storage.write_file(_texts(progress, batch, ok))
    file = NewFile(
        id=file_id,
        filename=f"{batch['id']}_{'output' if ok else 'error'}.jsonl",
        purpose="batch_output",
        num_bytes=num_bytes,
        expires_after_s=batch["outputs_expire_after_s"],
        caller=batch["caller"],
    )
    written.append(file)
    return file


def _texts(progress: Progress, batch: Row, ok: bool) -> Iterator[bytes]:
    after, num_lines = 0, 0
    while rows := progress.results(batch["id"], after, _LINES_PER_READ):
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
