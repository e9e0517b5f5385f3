"""The lines that this server has claimed: each runs as a task, and is here until its result is in the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from omniserve.server.batches.claims import ClaimedLine, Claims, LineKey, LineResult
from omniserve.server.batches.line_run import LineNotRun, refused, run_line
from omniserve.server.batches.loops import Changes, OneThread
from omniserve.server.batches.rows import new_id
from omniserve.server.errors import ApiError
from omniserve.server.service import Service

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RunningLine:
    """A line that this server has claimed, until its result is in the database."""

    line: ClaimedLine
    raw: bytes
    escalated: bool
    task: asyncio.Task[None] | None = None

    @property
    def is_computed(self) -> bool:
        """Whether it is at the engine, or on the way there."""
        return self.task is not None and not self.task.done()


class RunningLines:
    """The lines that this server has claimed, in the order in which it began with them.

    Args:
        service: Runs them.
        claims: Takes their results.
        claims_thread: Where the claims are called.
        changes: Told of lines that are done, and of results that are in the database.
    """

    def __init__(self, service: Service, claims: Claims, claims_thread: OneThread, changes: Changes) -> None:
        self._service = service
        self._claims = claims
        self._claims_thread = claims_thread
        self._changes = changes
        self._by_key: dict[LineKey, RunningLine] = {}
        self._results: list[LineResult] = []
        self._not_run: list[tuple[LineKey, LineNotRun]] = []

    @property
    def by_key(self) -> Mapping[LineKey, RunningLine]:
        """The lines as they are now; to be copied by who awaits something in between."""
        return self._by_key

    def add(self, entry: RunningLine) -> None:
        """Take a line in that was claimed; it is to be started."""
        self._by_key[entry.line.key] = entry

    def start(self, entry: RunningLine) -> None:
        """Begin to run a line."""
        entry.task = asyncio.create_task(self._run(entry))

    async def hand_in(self) -> None:
        """Bring results to the database, together; they stay here until they are there.

        Raises:
            StorageError: The database does not work; the next call tries again.
        """
        results, self._results = self._results, []
        not_run, self._not_run = self._not_run, []
        try:
            while results:
                await self._claims_thread.run(self._claims.save, results)
                for result in results:
                    self._by_key.pop(result.key, None)
                results = []
                self._changes.batches.set()
            while not_run:
                key, reason = not_run[0]
                give_back = partial(self._claims.give_back, key, delay_s=reason.delay_s)
                await self._claims_thread.run(partial(give_back, engine_stopped=reason.engine_stopped))
                self._by_key.pop(key, None)
                del not_run[0]
        finally:
            self._results[:0] = results
            self._not_run[:0] = not_run

    async def drop(self, entries: Sequence[RunningLine]) -> None:
        """Stop lines whose results nobody waits for; those that have one stay until it is in the database."""
        running = [entry for entry in entries if entry.is_computed]
        for entry in running:
            assert entry.task is not None
            entry.task.cancel()
        for entry in running:
            assert entry.task is not None
            await asyncio.gather(entry.task, return_exceptions=True)
            if entry.task.cancelled() and self._by_key.get(entry.line.key) is entry:
                del self._by_key[entry.line.key]
        self._changes.lines.set()

    async def _run(self, entry: RunningLine) -> None:
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
        self._changes.lines.set()
