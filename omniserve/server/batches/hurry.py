"""Which batches are late, and the lines of them that run as latency-sensitive requests because of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from omniserve.server.batches.claims import Claims
from omniserve.server.batches.loops import OneThread
from omniserve.server.batches.rows import Row
from omniserve.server.batches.running_lines import RunningLine, RunningLines
from omniserve.server.batches.urgency import Pace, num_urgent, predict

# So many looks back (one a second) it is seen how many lines run at a time: between two looks there may be a gap.
_LOOKS = 5


class Hurry:
    """Makes lines of late batches hurry.

    Args:
        running: The lines among which it chooses.
        claims: Notes which ones hurry.
        claims_thread: Where the claims are called.
        concurrency: Lines that run at a time.
    """

    def __init__(self, running: RunningLines, claims: Claims, claims_thread: OneThread, concurrency: int) -> None:
        self._running = running
        self._claims = claims
        self._claims_thread = claims_thread
        self._concurrency = concurrency
        self._paces: dict[str, Pace] = {}
        self._urgent: dict[str, int] = {}
        """How many lines of each late batch should hurry, those that expire first before others."""
        self._claimable: set[str] = set()
        self._num_running: deque[int] = deque(maxlen=_LOOKS)

    def judge(self, now: float, batches: Sequence[Row]) -> None:
        """Find out which batches are late, and by how much, if each has to wait for those that expire before it.

        Args:
            now: The database's time.
            batches: All of the model that are in progress, as ``Progress.running_batches`` returns them.
        """
        self._paces = {batch["id"]: self._paces.get(batch["id"]) or Pace() for batch in batches}
        self._claimable = {batch["id"] for batch in batches if batch["is_claimable"]}
        self._num_running.append(sum(batch["num_running"] for batch in batches))
        open_lines: list[tuple[int, float | None]] = []
        for batch in batches:
            pace, num_done = self._paces[batch["id"]], batch["completed"] + batch["failed"]
            pace.add(now, num_done, batch["num_running"])
            open_lines.append((batch["total"] - num_done, pace.line_s))
        self._urgent.clear()
        for batch, remaining_s in zip(batches, predict(open_lines, max(self._num_running)), strict=True):
            number = num_urgent(remaining_s, batch["expires_at"] - now, self._concurrency)
            if number and batch["may_escalate"] and batch["problem"] is None:  # else it is not time that it lacks
                self._urgent[batch["id"]] = number

    def lacking(self) -> dict[str, int]:
        """Return how many more lines of late batches should hurry than do, if any."""
        lacking = {batch_id: self._num_lacking(batch_id) for batch_id in self._urgent}
        return {batch_id: number for batch_id, number in lacking.items() if number > 0}

    async def escalate(self, entries: Sequence[RunningLine]) -> None:
        """Let the first of these lines, in the file's order, run as latency-sensitive requests as far as is urgent.

        They are not started yet.

        Raises:
            StorageError: The database does not work; none of them will hurry.
        """
        chosen: list[RunningLine] = []
        room = self.lacking()
        for entry in entries:
            batch_id = entry.line.batch_id
            if not entry.escalated and room.get(batch_id, 0) > 0:
                room[batch_id] -= 1
                chosen.append(entry)
        if chosen:
            await self._claims_thread.run(self._claims.escalate, [entry.line.key for entry in chosen])
            for entry in chosen:
                entry.escalated = True

    async def make_way(self) -> None:
        """Where a late batch has too few lines that hurry, let one that runs begin again as one that does.

        It is the oldest of the batch. If none of its lines run, one of another batch gives way to one that can be
        claimed: that will be the next to be. What was computed is lost, so it is one at a time.

        Raises:
            StorageError: The database does not work.
        """
        for batch_id in self.lacking():
            calm = [entry for entry in self._running.by_key.values() if entry.is_computed and not entry.escalated]
            own = [entry for entry in calm if entry.line.batch_id == batch_id]
            if own:
                first = min(own, key=lambda entry: entry.line.number)
                await self._running.drop([first])
                if first.line.key not in self._running.by_key:
                    again = RunningLine(first.line, first.raw, False)
                    self._running.add(again)
                    try:
                        await self.escalate([again])
                    finally:
                        self._running.start(again)
            elif calm and batch_id in self._claimable and len(self._running.by_key) >= self._concurrency:
                last = calm[-1]
                await self._running.drop([last])
                if last.line.key not in self._running.by_key:  # it may have come to its end just then
                    await self._claims_thread.run(partial(self._claims.give_back, last.line.key, delay_s=0.0))

    def _num_lacking(self, batch_id: str) -> int:
        """Return how many more lines of a batch should hurry than do."""
        lines = [entry for entry in self._running.by_key.values() if entry.line.batch_id == batch_id]
        return self._urgent[batch_id] - sum(entry.escalated for entry in lines)
