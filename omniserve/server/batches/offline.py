"""A batch without a server: a file in, two files out, and a journal beside them that a crash leaves to go on from."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from omniserve.core.errors import EngineStopped
from omniserve.server.batches.database import BATCHES, UNFINISHED, Row, StorageError
from omniserve.server.batches.files import BatchSettings, FileFolder, read_parts
from omniserve.server.batches.locks import FileLock
from omniserve.server.batches.runner import BatchRunner
from omniserve.server.batches.store import NewBatch, NewFile, Store
from omniserve.server.engines.fleet import Fleet
from omniserve.server.options import ServerOptions
from omniserve.server.serve import EngineFactory, fleet_of, start_service

logger = logging.getLogger("omniserve.batch")

_POLL_S = 0.25
_SAY_EVERY_S = 60.0
"""Seconds between two messages of the log on how many lines are done, where no terminal shows a bar."""
_NO_WINDOW_S = 10 * 365 * 86400.0
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineJob:
    """An input file to run, and the files for its results."""

    input: Path
    output: Path
    errors: Path
    """Gets the lines that have an error instead of an answer; not there if there are none."""
    endpoint: str

    @property
    def journal(self) -> Path:
        """The file that keeps the progress until all lines are done."""
        return self.output.with_name(self.output.name + ".journal")


async def run_offline(job: OfflineJob, options: ServerOptions, make_engine: EngineFactory) -> int:
    """Run a batch, or go on with one that was interrupted; return the exit status.

    0 if every line has an answer, 1 if some have an error, 2 if nothing could be run, 130 after Ctrl-C.
    """
    try:
        with _locked(job.journal):
            store = await asyncio.to_thread(Store.open, BatchSettings(data_dir=job.journal))
            batch = await asyncio.to_thread(_find_or_create, store, job, options.model_names[0])
            stop = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            batch = await _work(store, batch["id"], options, make_engine, stop)
            if batch["status"] in UNFINISHED:
                logger.warning("stopped; run the same command again to go on")
                return _INTERRUPTED
            status = await asyncio.to_thread(_deliver, job, store.files, batch)
            _remove(job.journal)
            return status
    except (StorageError, EngineStopped, OSError) as error:
        logger.error("%s", error)
        return 2


@contextmanager
def _locked(journal: Path) -> Iterator[None]:
    """Lock a journal for this process alone; the lock goes with the process."""
    journal.mkdir(parents=True, exist_ok=True)
    lock = FileLock(journal / "lock")
    if not lock.acquire():
        raise StorageError(f"another process works with {journal}; wait for it or choose another output")
    try:
        yield
    finally:
        lock.release()


def _find_or_create(store: Store, job: OfflineJob, model: str) -> Row:
    with job.input.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    wanted = {"input": digest, "endpoint": job.endpoint, "model": model}
    found = store.page(BATCHES, limit=1).rows
    if found:
        if json.loads(found[0]["user_metadata"]) != wanted:
            raise StorageError(
                f"{job.journal} is of another run (other input, endpoint or model); finish that one, delete the "
                "journal or choose another output"
            )
        logger.info("going on with %s", job.journal)
        return found[0]
    with job.input.open("rb") as file:
        input_file = store.add_file(NewFile(filename=job.input.name, purpose="batch"), read_parts(file))
    return store.create_batch(
        NewBatch(
            model=model,
            endpoint=job.endpoint,
            input_file_id=input_file["id"],
            completion_window="none",
            window_s=_NO_WINDOW_S,
            metadata=wanted,
        )
    )


async def _work(
    store: Store, batch_id: str, options: ServerOptions, make_engine: EngineFactory, stop: asyncio.Event
) -> Row:
    """Run until the batch has ended, or until told to stop; return it."""
    engine = fleet_of(options, make_engine)
    try:
        starting = asyncio.create_task(start_service(engine, options))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return await asyncio.to_thread(store.batch, batch_id)
        runner = BatchRunner(starting.result(), store)
        runner.start()
        try:
            return await _follow(store, batch_id, engine, stop)
        finally:
            await runner.stop()
    finally:
        await engine.close()


async def _follow(store: Store, batch_id: str, engine: Fleet, stop: asyncio.Event) -> Row:
    said_s = time.monotonic()
    with tqdm(unit="line", dynamic_ncols=True, disable=None) as bar:
        while True:
            batch = await asyncio.to_thread(store.batch, batch_id)
            if bar.disable and time.monotonic() - said_s >= _SAY_EVERY_S:
                logger.info("%d of %d lines are done", batch["completed"] + batch["failed"], batch["total"])
                said_s = time.monotonic()
            if bar.total != batch["total"]:
                bar.reset(batch["total"])
                # So that only this run's lines make the rate.
                bar.initial = bar.n = batch["completed"] + batch["failed"]
            bar.update(batch["completed"] + batch["failed"] - bar.n)
            if batch["status"] not in UNFINISHED or stop.is_set():
                return batch
            if engine.stopped.is_set():
                raise EngineStopped(f"the engine has stopped: {engine.failure}; run the same command again to go on")
            await asyncio.sleep(_POLL_S)


def _deliver(job: OfflineJob, files: FileFolder, batch: Row) -> int:
    for fault in json.loads(batch["errors"] or "[]"):
        logger.error("%s: %s%s", job.input, f"line {fault['line']}: " if fault["line"] else "", fault["message"])
    if batch["status"] == "failed":
        return 2
    job.errors.unlink(missing_ok=True)
    if batch["error_file_id"] is not None:
        _copy(files, batch["error_file_id"], job.errors)
        logger.warning("%d of %d lines have an error: see %s", batch["failed"], batch["total"], job.errors)
    _copy(files, batch["output_file_id"], job.output)
    logger.info("%d lines in %s", batch["completed"], job.output)
    return 0 if batch["error_file_id"] is None else 1


def _remove(journal: Path) -> None:
    """Remove a journal at one blow: half of one would be taken for a damaged one."""
    done = journal.with_name(f".{journal.name}.done-{uuid.uuid4().hex}")
    journal.rename(done)
    shutil.rmtree(done)


def _copy(files: FileFolder, file_id: str | None, target: Path) -> None:
    """Write a file under a name chosen by the user; complete or not at all."""
    folder = FileFolder(target.parent.absolute())
    if file_id is None:
        folder.write(target.name, ())
        return
    with files.open(file_id) as source:
        folder.write(target.name, read_parts(source))
