"""The work on lines: claim as many as there is room for, read them, have them run, and hand in what is done."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from omniserve.server.batches.claims import ClaimedLine, Claims
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.hurry import Hurry
from omniserve.server.batches.loops import RETRY_S, Changes, OneThread, set_or_polled
from omniserve.server.batches.running_lines import RunningLine, RunningLines
from omniserve.server.errors import ApiError
from omniserve.server.service import Service

logger = logging.getLogger(__name__)


class LineWorker:
    """Keeps lines running.

    Args:
        service: Says whether lines can be run now.
        files: Where the lines lie.
        running: Those that run.
        hurry: Says which batches come first, and which of the new lines run as latency-sensitive requests.
        claims: Gives new ones.
        claims_thread: Where the claims are called.
        changes: Says when to look again.
        concurrency: Lines that run at a time.
    """

    def __init__(
        self,
        service: Service,
        files: FileFolder,
        running: RunningLines,
        hurry: Hurry,
        claims: Claims,
        claims_thread: OneThread,
        changes: Changes,
        *,
        concurrency: int,
    ) -> None:
        self._service = service
        self._files = files
        self._running = running
        self._hurry = hurry
        self._claims = claims
        self._claims_thread = claims_thread
        self._changes = changes
        self._concurrency = concurrency

    async def work(self) -> None:
        """Hand in what is done, start what there is room for, and wait until there may be more.

        Raises:
            StorageError: The database does not work; what was claimed is started or given back some time.
        """
        self._changes.lines.clear()
        await self._running.hand_in()
        free = self._concurrency - len(self._running.by_key)
        if free > 0 and self._is_open():
            with_suspect = not any(entry.line.is_suspect for entry in self._running.by_key.values())
            claimed = await self._claims_thread.run(self._claim, free, with_suspect, self._hurry.lacking())
            entries = [RunningLine(line, raw, line.escalated) for line, raw in claimed if isinstance(raw, bytes)]
            for entry in entries:
                self._running.add(entry)
            try:
                await self._hurry.escalate(entries)
            finally:  # at any rate: nobody else would start them
                for entry in entries:
                    self._running.start(entry)
            await self._return_unread([(line, raw) for line, raw in claimed if isinstance(raw, StorageError)])
        await set_or_polled(self._changes.lines)

    def _is_open(self) -> bool:
        try:
            self._service.check_open()
        except ApiError:
            return False
        return True

    def _claim(
        self, limit: int, with_suspect: bool, first: Mapping[str, int]
    ) -> list[tuple[ClaimedLine, bytes | StorageError]]:
        claimed: list[tuple[ClaimedLine, bytes | StorageError]] = []
        for line in self._claims.claim(limit, with_suspect=with_suspect, first=first):
            try:
                claimed.append((line, self._files.read_part(line.input_file_id, line.start, line.length)))
            except StorageError as error:
                claimed.append((line, error))
        return claimed

    async def _return_unread(self, unread: Sequence[tuple[ClaimedLine, StorageError]]) -> None:
        for batch_id, error in {line.batch_id: error for line, error in unread}.items():
            logger.warning("batches: %s is held up: %s", batch_id, error)
            await self._claims_thread.run(self._claims.report, batch_id, error.message)
        for line, _ in unread:
            await self._claims_thread.run(partial(self._claims.give_back, line.key, delay_s=2 * RETRY_S))
