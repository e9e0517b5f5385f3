"""The work on batches: check inputs, run lines, write results, watch the clock.

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
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from omniserve.server.batches.claims import ClaimedLine, Claims, LineKey, LineResult
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.line_run import LineNotRun, refused, run_line
from omniserve.server.batches.lines import CheckedFile, check_file
from omniserve.server.batches.outputs import finish
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.storage import Storage
from omniserve.server.batches.store import Row, new_id
from omniserve.server.batches.urgency import Pace, num_urgent
from omniserve.server.errors import ApiError
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

# How soon what other servers did is seen; what clients of this one did is seen at once.
_POLL_S = 1.0
_RETRY_S = 5.0
_SWEEP_EVERY_S = 600.0
_RENEWALS_PER_LEASE = 3


@dataclass(slots=True, eq=False)
class _Running:
    """A line that this server has claimed, until its result is in the database."""

    line: ClaimedLine
    raw: bytes
    escalated: bool
    task: asyncio.Task[None] | None = None

    @property
    def is_computed(self) -> bool:
        """Whether it is at the engine, or on the way there."""
        return self.task is not None and not self.task.done()


class BatchRunner:
    """Works on the batches of a database until stopped.

    Args:
        service: Runs the lines.
        storage: Holds them; closed by ``stop``.
        settings: How many lines at a time, and so on.
    """

    def __init__(self, service: Service, storage: Storage, settings: BatchSettings) -> None:
        self._service = service
        self._settings = settings
        self._storage = storage
        self._files = storage.files
        self._store = storage.store
        owner = f"{socket.gethostname()[:64]}-{os.getpid()}-{new_id('')}"
        self._claims = Claims(storage.database, owner=owner, model=service.model_name, lease_s=settings.lease_s)
        self._claims_thread = ThreadPoolExecutor(1, thread_name_prefix="batch-claims")
        self._batch_thread = ThreadPoolExecutor(1, thread_name_prefix="batch-files")
        self._running: dict[LineKey, _Running] = {}
        self._results: list[LineResult] = []
        self._not_run: list[tuple[LineKey, LineNotRun]] = []
        self._lines_changed = asyncio.Event()
        self._batches_changed = asyncio.Event()
        self._orphans: set[LineKey] = set()
        self._urgent: dict[str, int] = {}
        self._paces: dict[str, Pace] = {}
        self._renewed_s = time.monotonic()
        self._swept_s = -_SWEEP_EVERY_S
        self._loops: list[asyncio.Task[None]] = []

    async def take_over(self) -> None:
        """Free what a process that is dead for certain had claimed, instead of waiting for its leases to end."""
        await self._claim_thread(self._claims.take_over)

    def start(self) -> None:
        """Begin to work."""
        self._renewed_s = time.monotonic()
        steps = (self._work_on_lines, self._work_on_batches, self._watch, self._renew)
        self._loops = [asyncio.create_task(self._forever(step)) for step in steps]

    async def stop(self) -> None:
        """Give back what is not done, for this server's next start or another server."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._drop(list(self._running.values()))
        # Waits for a file that is just read or written: seconds at most.
        await asyncio.to_thread(self._batch_thread.shutdown)
        try:
            await self._hand_in()
            await self._claim_thread(self._claims.release)
        except StorageError as error:
            logger.warning("batches: %s; what runs here is free when its lease ends", error)
        await asyncio.to_thread(self._claims_thread.shutdown)
        self._storage.close()

    def notice(self) -> None:
        """Look at the batches now: one was created or cancelled."""
        self._batches_changed.set()

    async def drop_batch(self, batch_id: str) -> None:
        """Stop the lines of a batch that was ended."""
        await self._drop([entry for entry in self._running.values() if entry.line.batch_id == batch_id])
        self.notice()

    async def _forever(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await step()
            except StorageError as error:
                logger.warning("batches: %s; trying again in %g s", error, _RETRY_S)
                await asyncio.sleep(_RETRY_S)
            except Exception:
                logger.exception("batches: unexpected; trying again in %g s", _RETRY_S)
                await asyncio.sleep(_RETRY_S)

    # Lines.

    async def _work_on_lines(self) -> None:
        self._lines_changed.clear()
        await self._hand_in()
        free = self._settings.concurrency - len(self._running)
        if free > 0 and self._is_open():
            with_suspect = not any(entry.line.is_suspect for entry in self._running.values())
            claimed = await self._claim_thread(self._claim, free, with_suspect)
            entries = [_Running(line, raw, line.escalated) for line, raw in claimed if isinstance(raw, bytes)]
            for entry in entries:
                self._running[entry.line.key] = entry
            try:
                await self._escalate(entries)
            finally:  # at any rate: nobody else would start them
                for entry in entries:
                    self._start_line(entry)
            await self._return_unread([(line, raw) for line, raw in claimed if isinstance(raw, StorageError)])
        await _set_or_timeout(self._lines_changed, _POLL_S)

    def _is_open(self) -> bool:
        try:
            self._service.check_open()
        except ApiError:
            return False
        return True

    def _claim(self, limit: int, with_suspect: bool) -> list[tuple[ClaimedLine, bytes | StorageError]]:
        claimed: list[tuple[ClaimedLine, bytes | StorageError]] = []
        for line in self._claims.claim(limit, with_suspect=with_suspect):
            try:
                claimed.append((line, self._files.read_part(line.input_file_id, line.start, line.length)))
            except StorageError as error:
                claimed.append((line, error))
        return claimed

    async def _return_unread(self, unread: Sequence[tuple[ClaimedLine, StorageError]]) -> None:
        for batch_id, error in {line.batch_id: error for line, error in unread}.items():
            logger.warning("batches: %s is held up: %s", batch_id, error)
            await self._claim_thread(self._claims.report, batch_id, error.message)
        for line, _ in unread:
            await self._claim_thread(partial(self._claims.give_back, line.key, delay_s=2 * _RETRY_S))

    async def _escalate(self, entries: Sequence[_Running]) -> None:
        """Let the first of these lines, in the file's order, run as latency-sensitive requests as far as is urgent."""
        chosen: list[_Running] = []
        room = {batch_id: self._num_lacking(batch_id) for batch_id in self._urgent}
        for entry in entries:
            batch_id = entry.line.batch_id
            if not entry.escalated and room.get(batch_id, 0) > 0:
                room[batch_id] -= 1
                chosen.append(entry)
        if chosen:
            await self._claim_thread(self._claims.escalate, [entry.line.key for entry in chosen])
            for entry in chosen:
                entry.escalated = True

    def _num_lacking(self, batch_id: str) -> int:
        """Return how many more lines of a batch should hurry than do."""
        hurrying = sum(entry.escalated for entry in self._running.values() if entry.line.batch_id == batch_id)
        return self._urgent[batch_id] - hurrying

    def _start_line(self, entry: _Running) -> None:
        entry.task = asyncio.create_task(self._run_line(entry))

    async def _run_line(self, entry: _Running) -> None:
        line = entry.line
        try:
            result = await run_line(self._service, line, entry.raw, escalated=entry.escalated)
        except LineNotRun as reason:
            self._not_run.append((line.key, reason))
        except Exception as error:
            logger.exception("batches: line %d of %s failed", line.number, line.batch_id)
            message = f"internal error ({type(error).__name__}); see the server's log"
            self._results.append(refused(line, ApiError(message, status=500), new_id("req_")))
        else:
            self._results.append(result)
        self._lines_changed.set()

    async def _hand_in(self) -> None:
        """Bring results to the database, together; they stay here until they are there."""
        results, self._results = self._results, []
        not_run, self._not_run = self._not_run, []
        try:
            while results:
                await self._claim_thread(self._claims.save, results)
                for result in results:
                    self._running.pop(result.key, None)
                results = []
                self._batches_changed.set()
            while not_run:
                key, reason = not_run[0]
                give_back = partial(self._claims.give_back, key, delay_s=reason.delay_s)
                await self._claim_thread(partial(give_back, engine_stopped=reason.engine_stopped))
                self._running.pop(key, None)
                del not_run[0]
        finally:
            self._results[:0] = results
            self._not_run[:0] = not_run

    async def _drop(self, entries: Sequence[_Running]) -> None:
        """Stop lines whose results nobody waits for; those that have one stay until it is in the database."""
        running = [entry for entry in entries if entry.is_computed]
        for entry in running:
            assert entry.task is not None
            entry.task.cancel()
        for entry in running:
            assert entry.task is not None
            await asyncio.gather(entry.task, return_exceptions=True)
            if entry.task.cancelled() and self._running.get(entry.line.key) is entry:
                del self._running[entry.line.key]
        self._lines_changed.set()

    async def _renew(self) -> None:
        await asyncio.sleep(self._settings.lease_s / _RENEWALS_PER_LEASE)
        before = list(self._running.values())
        started_s = time.monotonic()
        renewing = asyncio.ensure_future(self._claim_thread(self._claims.renew))
        left_s = self._renewed_s + self._settings.lease_s - started_s
        await asyncio.wait([renewing], timeout=max(0.0, left_s))
        if not renewing.done() or renewing.exception() is not None:
            if before and time.monotonic() - self._renewed_s >= self._settings.lease_s:
                logger.warning("batches: %d lines were not renewed in time and are left to others", len(before))
                await self._drop(before)
            await asyncio.wait([renewing])
        try:
            mine = renewing.result()
            self._renewed_s = started_s
            await self._claim_thread(self._claims.renew_batch)
        except StorageError as error:
            logger.warning("batches: %s; leases are renewed later", error)
            return
        # Claimed, but the answer never came here: not on the way, if they were unknown the last time, too.
        unknown = mine - self._running.keys()
        for key in unknown & self._orphans:
            await self._claim_thread(partial(self._claims.give_back, key, delay_s=0.0))
        self._orphans = unknown
        lost = [entry for entry in before if entry.line.key not in mine]
        await self._drop([entry for entry in lost if self._running.get(entry.line.key) is entry])

    # Whole batches.

    async def _work_on_batches(self) -> None:
        self._batches_changed.clear()
        owner = self._claims.owner
        batch = await self._in_batch_thread(self._store.claim_batch, owner, self._claims.model, self._settings.lease_s)
        if batch is None:
            await _set_or_timeout(self._batches_changed, _POLL_S)
            return
        try:
            if batch["status"] == "validating":
                await self._in_batch_thread(self._validate, batch)
            else:
                await self._in_batch_thread(finish, self._storage, batch, owner)
        except StorageError as error:
            logger.warning("batches: %s is held up: %s", batch["id"], error)
            await self._in_batch_thread(self._store.postpone_batch, batch["id"], owner, error.message, 2 * _RETRY_S)
        except Exception as error:
            logger.exception("batches: %s is held up", batch["id"])
            problem = f"internal error ({type(error).__name__}); see the server's log"
            await self._in_batch_thread(self._store.postpone_batch, batch["id"], owner, problem, 2 * _RETRY_S)
        self._lines_changed.set()

    def _validate(self, batch: Row) -> None:
        file = self._store.file(batch["input_file_id"])
        found = self._check(self._files.path(file["id"], file["num_bytes"]), batch["endpoint"])
        if found.faults:
            self._store.fail_batch(batch["id"], self._claims.owner, found.faults)
        else:
            self._store.accept_lines(batch["id"], self._claims.owner, found.lines)

    def _check(self, path: os.PathLike[str], endpoint: str) -> CheckedFile:
        with open(path, "rb") as file:
            return check_file(file, endpoint, self._service.check_model, self._settings.max_lines)

    # The clock.

    async def _watch(self) -> None:
        for batch_id in await self._claim_thread(self._store.expire_batches):
            await self.drop_batch(batch_id)
        if await self._claim_thread(self._claims.free_overdue):
            self._lines_changed.set()
        now, batches = await self._claim_thread(self._store.running_batches)
        self._judge(now, batches)
        await self._make_way()
        if time.monotonic() - self._swept_s > _SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            await self._in_batch_thread(self._sweep)
        await asyncio.sleep(_POLL_S)

    def _sweep(self) -> None:
        self._store.forget_expired_files()
        self._storage.sweep()
        self._files.remove_abandoned()

    def _judge(self, now: float, batches: Sequence[Row]) -> None:
        """Find out which batches are late, and by how much."""
        self._paces = {batch["id"]: self._paces.get(batch["id"]) or Pace() for batch in batches}
        self._urgent.clear()
        for batch in batches:
            pace, num_done = self._paces[batch["id"]], batch["completed"] + batch["failed"]
            pace.add(now, num_done)
            remaining_s = pace.remaining_s(now, batch["total"] - num_done)
            number = num_urgent(remaining_s, batch["expires_at"] - now, self._settings.concurrency)
            if number and batch["may_escalate"]:
                self._urgent[batch["id"]] = number

    async def _make_way(self) -> None:
        """Where a late batch has too few lines that hurry, let one that runs begin again as one that does.

        It is the oldest of the batch. If none of its lines run, one of another batch gives way to it. What was computed
        is lost, so it is one at a time.
        """
        for batch_id in [batch_id for batch_id in self._urgent if self._num_lacking(batch_id) > 0]:
            calm = [entry for entry in self._running.values() if entry.is_computed and not entry.escalated]
            own = [entry for entry in calm if entry.line.batch_id == batch_id]
            if own:
                first = min(own, key=lambda entry: entry.line.number)
                await self._drop([first])
                if first.line.key not in self._running:
                    again = _Running(first.line, first.raw, False)
                    self._running[again.line.key] = again
                    try:
                        await self._escalate([again])
                    finally:
                        self._start_line(again)
            elif calm and len(self._running) >= self._settings.concurrency:
                last = calm[-1]
                await self._drop([last])
                if last.line.key not in self._running:  # it may have come to its end just then
                    await self._claim_thread(partial(self._claims.give_back, last.line.key, delay_s=0.0))

    async def _claim_thread(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._claims_thread, function, *args)

    async def _in_batch_thread(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._batch_thread, function, *args)


async def _set_or_timeout(changed: asyncio.Event, timeout_s: float) -> None:
    try:
        # Not wait_for, which before Python 3.12 forgets that it was cancelled if the event comes at the same time.
        async with asyncio.timeout(timeout_s):
            await changed.wait()
    except TimeoutError:
        pass  # time to look at what others did
