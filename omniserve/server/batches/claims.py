"""Who runs which line: claims with a lease, and results that are written once.

Any number of servers may share the database. A line belongs to nobody, to one owner until its lease ends, or is done.
Only its owner can write its result, so that each line has one, whatever happens to servers and clocks.
Every function is one transaction, and blocks: call it in a thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, select, update

from omniserve.server.batches.database import Database
from omniserve.server.batches.tables import BATCHES, IS_SUSPECT, LINES, SUSPECT_STOPS, LineState

LineKey = tuple[str, int]
"""Batch and number of a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedLine:
    """A line that the caller has to run."""

    batch_id: str
    number: int
    custom_id: str
    endpoint: str
    input_file_id: str
    start: int
    length: int
    engine_stops: int
    """How often the engine ended while it ran."""
    escalated: bool
    """Whether it runs as a latency-sensitive request."""

    @property
    def key(self) -> LineKey:
        return self.batch_id, self.number

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ends the engine."""
        return self.engine_stops >= SUSPECT_STOPS


@dataclass(frozen=True, kw_only=True, slots=True)
class LineResult:
    """What became of a line."""

    key: LineKey
    ok: bool
    text: str
    """Its line of the output file, or of the error file."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0


class Claims:
    """The claims of one owner; all functions raise StorageError when the database does not work.

    Args:
        owner: A name that no other process has or had.
        model: The name of the model that it serves; batches for others are left to others.
        lease_s: How long a claim holds if it is not renewed.
        steady_s: A clock that nobody sets.
    """

    def __init__(
        self,
        database: Database,
        *,
        owner: str,
        model: str,
        lease_s: float,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self.owner = owner
        self.model = model
        self.lease_s = lease_s
        self._steady_s = steady_s
        self._overdue_since_s: dict[tuple[str, float], float] = {}
        """When an owner's lease that ended at some time was first seen to be over."""

    def claim(
        self, limit: int, *, with_suspect: bool = True, first: Mapping[str, int] | None = None
    ) -> list[ClaimedLine]:
        """Take lines, of the batch that expires first and in the file's order.

        Args:
            limit: Most lines.
            with_suspect: Take one line that may be what ends the engine, too. To find out which one does, a server has
                only one at a time.
            first: So many lines of these batches come before all others.
        """
        first = first or {}
        with self._database.write() as connection:
            now = self._database.now(connection)
            query = select(*BATCHES.c["id", "endpoint", "input_file_id"]).where(
                BATCHES.c.status == "in_progress", BATCHES.c.model == self.model
            )
            batches = connection.execute(query.order_by(BATCHES.c.expires_at, BATCHES.c.id)).mappings().all()
            turns = [(batch, first[batch["id"]]) for batch in batches if batch["id"] in first]
            turns += [(batch, limit) for batch in batches]
            claimed: list[ClaimedLine] = []
            for batch, most in turns:
                room = min(most, limit - len(claimed))
                if room <= 0:
                    continue
                lines = _free_lines(connection, batch, now, room, with_suspect)
                with_suspect = with_suspect and not any(line.is_suspect for line in lines)
                for line in lines:
                    values = {"state": LineState.RUNNING, "owner": self.owner, "lease_until": now + self.lease_s}
                    connection.execute(update(LINES).where(_is(line.key)).values(values))
                claimed += lines
            return claimed

    def save(self, results: Sequence[LineResult]) -> list[LineKey]:
        """Write results; return the lines among them that were not the owner's any more, whose results are dropped.

        A batch of which every line has its result goes on to be finalized in the same transaction.
        """
        with self._database.write() as connection:
            ids = sorted({result.key[0] for result in results})
            batches = _lock_batches(connection, BATCHES.c.id.in_(ids))
            lost: list[LineKey] = []
            added: dict[str, Counter[str]] = {batch_id: Counter() for batch_id in ids}
            for result in results:
                done = {"state": LineState.DONE, "ok": result.ok, "result": result.text, "owner": None}
                if not connection.execute(update(LINES).where(self._mine(result.key)).values(done)).rowcount:
                    lost.append(result.key)
                    continue
                added[result.key[0]].update(
                    {
                        "completed": int(result.ok),
                        "failed": int(not result.ok),
                        "input_tokens": result.num_input_tokens,
                        "output_tokens": result.num_output_tokens,
                    }
                )
            for batch in batches:
                counts = added[batch["id"]]
                if not counts:
                    continue
                values: dict[str, Any] = {name: batch[name] + number for name, number in counts.items()}
                if values["completed"] + values["failed"] == batch["total"] and batch["status"] == "in_progress":
                    values |= {
                        "status": "finalizing",
                        "finalizing_at": self._database.now(connection),
                        "not_before": 0.0,
                    }
                connection.execute(
                    update(BATCHES).where(BATCHES.c.id == batch["id"]).values({**values, "problem": None})
                )
            return lost

    def escalate(self, keys: Sequence[LineKey]) -> None:
        """Note that lines run as latency-sensitive requests from now on."""
        with self._database.write() as connection:
            counts: Counter[str] = Counter()
            _lock_batches(connection, BATCHES.c.id.in_({key[0] for key in keys}))
            for key in keys:
                query = update(LINES).where(self._mine(key), ~LINES.c.escalated).values(escalated=True)
                counts[key[0]] += connection.execute(query).rowcount
            for batch_id, number in counts.items():
                more = update(BATCHES).where(BATCHES.c.id == batch_id)
                connection.execute(more.values(escalated=BATCHES.c.escalated + number))

    def give_back(self, key: LineKey, *, delay_s: float, engine_stopped: bool = False) -> None:
        """Let anybody run a line again, after a delay."""
        with self._database.write() as connection:
            values = {"state": LineState.PENDING, "owner": None, "not_before": self._database.now(connection) + delay_s}
            stops = LINES.c.engine_stops + int(engine_stopped)
            connection.execute(update(LINES).where(self._mine(key)).values(**values, engine_stops=stops))

    def report(self, batch_id: str, problem: str) -> None:
        """Say in a batch's status what holds it up."""
        with self._database.write() as connection:
            connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(problem=problem))

    def renew(self) -> set[LineKey]:
        """Hold the owner's lines for another lease; return them."""
        with self._database.write() as connection:
            self._lock_batches_of_lines(connection)
            until = self._database.now(connection) + self.lease_s
            connection.execute(update(LINES).where(self._running).values(lease_until=until))
            rows = connection.execute(select(LINES.c.batch_id, LINES.c.number).where(self._running))
            return {(batch_id, number) for batch_id, number in rows}

    def renew_batch(self) -> None:
        """Hold the batch that the owner validates or finalizes for another lease."""
        with self._database.write() as connection:
            until = self._database.now(connection) + self.lease_s
            connection.execute(update(BATCHES).where(BATCHES.c.owner == self.owner).values(lease_until=until))

    def free_overdue(self) -> int:
        """Let lines whose owner is dead be claimed again; return how many there were.

        That is one whose lease was seen to be over for half a lease. If all leases are over at once, because the
        database's clock was set or everything was frozen, those who live have renewed them until then.
        """
        with self._database.write() as connection:
            overdue = (
                select(*LINES.c["batch_id", "number", "owner", "lease_until"])
                .where(LINES.c.state == LineState.RUNNING, LINES.c.lease_until < self._database.now(connection))
                .where(LINES.c.owner != self.owner)
                .with_for_update(skip_locked=True)
            )
            lines = connection.execute(overdue).mappings().all()
            now_s, before = self._steady_s(), self._overdue_since_s
            leases = {(line["owner"], line["lease_until"]) for line in lines}
            self._overdue_since_s = {lease: before.get(lease, now_s) for lease in leases}
            num_freed = 0
            for line in lines:
                if now_s - self._overdue_since_s[line["owner"], line["lease_until"]] >= self.lease_s / 2:
                    num_freed += _set_pending(connection, _is((line["batch_id"], line["number"])))
            return num_freed

    def release(self) -> None:
        """Give everything back at once."""
        with self._database.write() as connection:
            self._lock_batches_of_lines(connection)
            _set_pending(connection, self._running)
        with self._database.write() as connection:
            connection.execute(update(BATCHES).where(BATCHES.c.owner == self.owner).values(owner=None))

    def take_over(self) -> None:
        """Free whatever anybody has claimed. Only for who knows that nobody else is alive."""
        with self._database.write() as connection:
            _set_pending(connection, LINES.c.state == LineState.RUNNING)
            connection.execute(update(BATCHES).values(owner=None))

    @property
    def _running(self) -> ColumnElement[bool]:
        return and_(LINES.c.owner == self.owner, LINES.c.state == LineState.RUNNING)

    def _lock_batches_of_lines(self, connection: Connection) -> None:
        batches = select(LINES.c.batch_id).where(self._running)
        _lock_batches(connection, BATCHES.c.id.in_(batches))

    def _mine(self, key: LineKey) -> ColumnElement[bool]:
        return and_(_is(key), self._running)


def _free_lines(
    connection: Connection, batch: RowMapping, now: float, limit: int, with_suspect: bool
) -> list[ClaimedLine]:
    """Lock lines of a batch that nobody has and return them: one suspect at most, and first."""
    pending = (
        select(LINES)
        .where(LINES.c.batch_id == batch["id"], LINES.c.state == LineState.PENDING, LINES.c.not_before <= now)
        .order_by(LINES.c.number)
        .with_for_update(skip_locked=True)
    )
    lines: list[ClaimedLine] = []
    if with_suspect:
        lines += _claimed(batch, connection.execute(pending.where(IS_SUSPECT).limit(1)).mappings())
    others = pending.where(~IS_SUSPECT).limit(limit - len(lines))
    return lines + _claimed(batch, connection.execute(others).mappings())


def _claimed(batch: RowMapping, rows: Iterable[RowMapping]) -> list[ClaimedLine]:
    return [
        ClaimedLine(
            batch_id=batch["id"],
            number=row["number"],
            custom_id=row["custom_id"],
            endpoint=batch["endpoint"],
            input_file_id=batch["input_file_id"],
            start=row["start"],
            length=row["length"],
            engine_stops=row["engine_stops"],
            escalated=row["escalated"],
        )
        for row in rows
    ]


def _is(key: LineKey) -> ColumnElement[bool]:
    return and_(LINES.c.batch_id == key[0], LINES.c.number == key[1])


def _lock_batches(connection: Connection, where: ColumnElement[bool]) -> Sequence[RowMapping]:
    """Lock batches whose lines the transaction will lock.

    Everybody does it before, and in this order, so that no two transactions wait for each other; or locks no more than
    one line, or only lines that nobody else has locked.
    """
    return connection.execute(select(BATCHES).where(where).order_by(BATCHES.c.id).with_for_update()).mappings().all()


def _set_pending(connection: Connection, where: ColumnElement[bool]) -> int:
    return connection.execute(update(LINES).where(where).values(state=LineState.PENDING, owner=None)).rowcount
