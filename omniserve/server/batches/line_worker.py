"""Runs lines: as many as there is room for; saves their results, and escalates lines of late batches.

An escalated line runs as a latency-sensitive request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, TypeVarTuple

from omniserve.server.batches.database import Row, StorageError
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.lines import LineKey, LineResult, PendingLine, RunAgain, refused, run_line
from omniserve.server.batches.owner import Owner
from omniserve.server.batches.shares import LineShares
from omniserve.server.batches.store import new_id
from omniserve.server.batches.urgency import Urgency
from omniserve.server.errors import ApiError
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")


class OneThread:
    """A thread that runs blocking calls, one after the other."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Call a function there. A cancelled caller does not wait for it, but it is called all the same."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def stop(self) -> None:
        """Wait for the calls that are under way; take no more."""
        await asyncio.to_thread(self._executor.shutdown)


@dataclass(slots=True, eq=False)
class RunningLine:
    """A line that is counted as running, until its result is in the database or it may be tried again."""

    line: PendingLine
    raw: bytes
    escalated: bool
    task: asyncio.Task[None] | None = None

    @property
    def is_computed(self) -> bool:
        """True while the line is at the engine, or on the way there."""
        return self.task is not None and not self.task.done()


class LineWorker:
    """Keeps lines running.

    All that is here may be lost at any moment: what counts is in the database. What works with it raises StorageError
    when it does not work, and NotOwner when there is a new owner. ``done`` is set as results are in the database.
    """

    def __init__(self, service: Service, files: FileFolder, owner: Owner, done: asyncio.Event) -> None:
        self._service = service
        self._files = files
        self._owner = owner
        self._done = done
        self.changed = asyncio.Event()
        """Set when there may be lines to start or results to save: time to ``work``."""
        self._thread = OneThread("batch-lines")
        self._running: dict[LineKey, RunningLine] = {}
        """Running lines, in the order in which they began."""
        self._results: list[LineResult] = []
        self._not_run: list[tuple[RunningLine, RunAgain]] = []
        self._urgency = Urgency(self._concurrency)
        self._shares = LineShares(service.weights)
        self._urgent: dict[str, int] = {}
        """The number of lines of each late batch that should run as LS requests, in the order of expiry."""

    @property
    def _concurrency(self) -> int:
        return self._service.limits.batch_concurrency * max(1, len(self._service.engine.engines))

    async def work(self) -> None:
        """Save results, and start as many lines as there is room for."""
        await self._save_results()
        if len(self._running) < self._concurrency:
            try:
                self._service.check_open()
            except ApiError:
                return
            await self._begin()

    async def watch(self) -> None:
        """Stop the lines of batches that have ended, and look for batches that are late."""
        await self._thread.run(self._owner.expire_batches)
        before = list(self._running.values())
        now, batches = await self._thread.run(self._owner.running_batches)
        ids = {batch["id"] for batch in batches}
        await self._drop([entry for entry in before if entry.line.batch_id not in ids])
        self._urgency.concurrency = self._concurrency
        self._urgent = self._urgency.judge(now, batches, Counter(batch_id for batch_id, _ in self._running))
        self._service.metrics.scaling.batch_pressure = self._urgency.pressure
        await self._make_way({batch["id"] for batch in batches if self._has_waiting(batch)})

    async def drop(self, batch_id: str | None = None) -> None:
        """Stop the lines of a batch that was ended, or all lines."""
        await self._drop([entry for entry in self._running.values() if batch_id in (None, entry.line.batch_id)])

    async def stop(self) -> None:
        """Stop all lines, and save results, which are lost if that fails."""
        self._service.metrics.scaling.batch_pressure = 0.0  # another server's from now on
        await self.drop()
        try:
            await self._save_results()
        finally:
            await self._thread.stop()

    async def _begin(self) -> None:
        find = partial(
            self._owner.pending_lines,
            self._concurrency - len(self._running),
            held=set(self._running),
            with_suspect=not any(entry.line.is_suspect for entry in self._running.values()),
            first=self._lacking(),
            shares=self._shares,
        )
        entries, unreadable = await self._thread.run(self._read, find)
        self._running |= {entry.line.key: entry for entry in entries}
        try:
            await self._escalate(entries)
        finally:  # at any rate: they are counted as running
            for entry in entries:
                self._start(entry)
        for batch_id, error in unreadable.items():
            logger.warning("batches: %s is held up: %s", batch_id, error)
            await self._thread.run(self._owner.put_off, batch_id, error.message)

    def _read(self, find: partial[list[PendingLine]]) -> tuple[list[RunningLine], dict[str, StorageError]]:
        """Return lines that are to be started, and the batches of which a line cannot be read."""
        entries: list[RunningLine] = []
        unreadable: dict[str, StorageError] = {}
        for line in find():
            try:
                raw = self._files.read_part(line.input_file_id, line.start, line.length)
                entries.append(RunningLine(line, raw, line.escalated))
            except StorageError as error:
                unreadable[line.batch_id] = error
                self._shares.end(line, None)
        return entries, unreadable

    def _start(self, entry: RunningLine) -> None:
        entry.task = asyncio.create_task(self._run(entry))

    async def _run(self, entry: RunningLine) -> None:
        line = entry.line
        try:
            result = await run_line(self._service, line, entry.raw, escalated=entry.escalated)
        except Exception as error:
            logger.exception("batches: line %d of %s failed", line.number, line.batch_id)
            message = f"internal error ({type(error).__name__}); see the server's log"
            result = refused(line, ApiError(message, status=500), new_id("req_"))
        if isinstance(result, LineResult):
            self._results.append(result)
        else:
            self._not_run.append((entry, result))
        self.changed.set()

    async def _save_results(self) -> None:
        """Save results, all in one transaction; they are kept here until it has succeeded."""
        if results := list(self._results):
            await self._thread.run(self._owner.save, results)
            del self._results[: len(results)]
            for result in results:
                if (entry := self._running.pop(result.key, None)) is not None:
                    self._shares.end(entry.line, result)
            self._done.set()
        while self._not_run:
            entry, again = self._not_run[0]
            if again.engine_stopped:
                number = entry.line.engine_stops + 1
                await self._thread.run(self._owner.note_engine_stops, entry.line.key, number)
            del self._not_run[0]
            asyncio.get_running_loop().call_later(again.delay_s, self._free, entry)

    def _free(self, entry: RunningLine) -> None:
        """Make room for another line; this one is pending again."""
        if self._running.get(entry.line.key) is entry:
            del self._running[entry.line.key]
            self._shares.end(entry.line, None)
        self.changed.set()

    async def _drop(self, entries: Iterable[RunningLine]) -> None:
        """Stop lines that are computed; those that have a result stay until it is in the database."""
        tasks = {entry: entry.task for entry in entries if entry.task is not None and not entry.task.done()}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for entry, task in tasks.items():
            if task.cancelled():
                self._free(entry)

    def _has_waiting(self, batch: Row) -> bool:
        """Tell whether a batch has a line that could be started; suspects, which have to wait, do not count."""
        held = [entry for entry in self._running.values() if entry.line.batch_id == batch["id"]]
        num_open = batch["total"] - batch["completed"] - batch["failed"] - batch["num_suspects"]
        return not self._owner.is_put_off(batch["id"]) and num_open > sum(not entry.line.is_suspect for entry in held)

    def _lacking(self) -> Mapping[str, int]:
        """Return, for each late batch with too few escalated lines, how many more there should be."""
        num_escalated = Counter(entry.line.batch_id for entry in self._running.values() if entry.escalated)
        lacking = {batch_id: number - num_escalated[batch_id] for batch_id, number in self._urgent.items()}
        return {batch_id: number for batch_id, number in lacking.items() if number > 0}

    async def _escalate(self, entries: Sequence[RunningLine]) -> None:
        """Escalate the first of these lines, not started yet, as far as their batches lack escalated lines."""
        chosen: list[RunningLine] = []
        room = dict(self._lacking())
        for entry in entries:
            batch_id = entry.line.batch_id
            if not entry.escalated and room.get(batch_id, 0) > 0:
                room[batch_id] -= 1
                chosen.append(entry)
        if chosen:
            await self._thread.run(self._owner.escalate, [entry.line.key for entry in chosen])
            for entry in chosen:
                entry.escalated = True

    async def _make_way(self, waiting: set[str]) -> None:
        """Start again, escalated, the oldest running line of each late batch that has too few escalated lines.

        If none of its lines run, and the batch is among those ``waiting`` for room, a line of another batch is stopped:
        the next one to start is of the late batch. What was computed is lost, so it is one line at a time.
        """
        for batch_id in self._lacking():
            calm = [entry for entry in self._running.values() if entry.is_computed and not entry.escalated]
            own = [entry for entry in calm if entry.line.batch_id == batch_id]
            if own:
                first = min(own, key=lambda entry: entry.line.number)
                again = RunningLine(first.line, first.raw, False)
                await self._drop([first])
                if first.line.key not in self._running:  # it may have come to its end just then
                    self._running[first.line.key] = again
                    try:
                        await self._escalate([again])
                    finally:
                        self._start(again)
            elif calm and batch_id in waiting and len(self._running) >= self._concurrency:
                await self._drop(calm[-1:])
