"""The owner: for each database and model, the one server that validates, runs and finalizes its batches.

A server becomes the owner when it gets the lock, which its death frees. Each owner then gets a fencing number that is
higher than all before it, and every write of an owner checks, in its transaction, that there is no higher one. A lock
may be lost without notice (a connection that broke, a machine that was frozen); the fence keeps a former owner from
writing.

A line is pending until its result is in the database; which lines run is known to the owner alone, so that its death
leaves nothing to be cleared up.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, update

from omniserve.server.batches.database import (
    BATCHES,
    IS_SUSPECT,
    LINES,
    OWNERS,
    UNFINISHED,
    Database,
    LineState,
    Row,
    StorageError,
)
from omniserve.server.batches.lines import CheckedLine, LineFault, LineKey, LineResult, PendingLine
from omniserve.server.batches.locks import Lock
from omniserve.server.batches.shares import Caller, LineShares
from omniserve.server.batches.store import NewFile, end_lines, get_row, make_known, set_batch

_ROWS_PER_INSERT = 1000
# A batch that waits for so long to be finalized has no server of its model; any owner finalizes it.
_ABANDONED_AFTER_S = 30.0
_PUT_OFF_S = 10.0
_PENDING_COLUMNS = LINES.c["batch_id", "number", "custom_id", "start", "length", "engine_stops", "escalated"]


class NotOwner(Exception):
    """The server does not own the batches of its model, or cannot prove that it does."""


class Owner:
    """The batches of one model in the hands of this server, until it loses them; ``fence`` is its fencing number.

    Every function blocks: call it in a thread. All raise StorageError when the database does not work, and those that
    write, each in one transaction, raise NotOwner when there is a new owner.
    """

    def __init__(self, database: Database, lock: Lock, model: str, fence: int) -> None:
        self._database = database
        self._lock = lock
        self._model = model
        self._fence = fence
        self._put_off: dict[str, float] = {}
        """Batches that are held up, and till when they are put off."""

    @classmethod
    def take(cls, database: Database, lock: Lock, model: str) -> Owner | None:
        """Become the owner of the batches of a model; None if another process is."""
        if not lock.acquire():
            return None
        try:
            with database.write() as connection:
                is_model = OWNERS.c.model == model
                fence = connection.execute(select(OWNERS.c.fence).where(is_model).with_for_update()).scalar()
                if fence is None:
                    connection.execute(insert(OWNERS).values(model=model, fence=1))
                else:
                    connection.execute(update(OWNERS).where(is_model).values(fence=fence + 1))
                return cls(database, lock, model, (fence or 0) + 1)
        except StorageError:
            lock.release()
            raise

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that changes something, all of it or nothing. There is no new owner before it ends."""
        with self._database.write() as connection:
            self._check_fence(connection)
            yield connection

    def prove(self) -> None:
        """See that the server is still the owner. A lock that was lost is taken again if no other server had it since.

        Raises:
            NotOwner: It is not.
        """
        if not self._lock.is_held() and not self._lock.acquire():
            raise NotOwner(f"another process has the lock of the batches for {self._model!r}")
        with self._database.read() as connection:
            self._check_fence(connection)

    def put_off(self, batch_id: str, problem: str) -> None:
        """Leave a batch alone for a while, and say in its status what holds it up, unless it has ended."""
        self._put_off[batch_id] = time.monotonic() + _PUT_OFF_S
        with self.write() as connection:
            if _locked(connection, batch_id, *UNFINISHED) is not None:
                set_batch(connection, batch_id, {"problem": problem})

    def is_put_off(self, batch_id: str) -> bool:
        """Tell whether a batch is left alone now."""
        return self._put_off.get(batch_id, 0.0) > time.monotonic()

    def next_batch(self) -> Row | None:
        """Return the batch that has waited longest to be validated or finalized, if any; not one that is put off."""
        with self._database.read() as connection:
            abandoned = self._database.now(connection) - _ABANDONED_AFTER_S
            its_own = BATCHES.c.model == self._model
            ended_at = func.coalesce(BATCHES.c.cancelling_at, BATCHES.c.finalizing_at)
            to_validate = and_(BATCHES.c.status == "validating", its_own)
            to_finalize = and_(BATCHES.c.status.in_(("finalizing", "cancelling")), or_(its_own, ended_at < abandoned))
            put_off = [batch_id for batch_id in list(self._put_off) if self.is_put_off(batch_id)]
            query = select(BATCHES).where(or_(to_validate, to_finalize), BATCHES.c.id.not_in(put_off))
            return connection.execute(query.order_by(BATCHES.c.created_at).limit(1)).mappings().first()

    def accept_lines(self, batch_id: str, lines: Sequence[CheckedLine]) -> bool:
        """Add the lines of a batch whose input is valid; False if it was cancelled meanwhile."""
        with self.write() as connection:
            if _locked(connection, batch_id, "validating") is None:
                return False
            for i in range(0, len(lines), _ROWS_PER_INSERT):
                rows = [line._asdict() | {"batch_id": batch_id} for line in lines[i : i + _ROWS_PER_INSERT]]
                # With RETURNING it is one statement. Many small ones psycopg would send in a pipeline: one more place
                # where a server that is frozen holds its locks until another one ends them.
                connection.execute(insert(LINES).returning(LINES.c.number), rows)
            values = {"status": "in_progress", "total": len(lines), "problem": None}
            set_batch(connection, batch_id, values | {"in_progress_at": self._database.now(connection)})
            return True

    def fail_batch(self, batch_id: str, faults: Sequence[LineFault]) -> bool:
        """End a batch whose input is wrong; False if it was cancelled meanwhile."""
        with self.write() as connection:
            if _locked(connection, batch_id, "validating") is None:
                return False
            values = {"status": "failed", "errors": json.dumps([asdict(fault) for fault in faults]), "problem": None}
            set_batch(connection, batch_id, values | {"failed_at": self._database.now(connection)})
            return True

    def finish_batch(self, batch_id: str, output: NewFile | None, errors: NewFile | None) -> bool:
        """End a batch whose result files lie on the disk, and forget its lines; False if another owner has ended it."""
        with self.write() as connection:
            batch = _locked(connection, batch_id, "finalizing", "cancelling")
            if batch is None:
                return False
            now, status = self._database.now(connection), batch["outcome"]
            if batch["status"] == "cancelling":
                status = "cancelled"
            values: dict[str, Any] = {"status": status, f"{status}_at": now, "problem": None}
            for column, file in (("output_file_id", output), ("error_file_id", errors)):
                if file is not None:
                    make_known(connection, file, now)
                    values[column] = file.id
            set_batch(connection, batch_id, values)
            connection.execute(delete(LINES).where(LINES.c.batch_id == batch_id))
            return True

    def expire_batches(self) -> None:
        """End the batches, of any model, whose window is over."""
        with self.write() as connection:
            now = self._database.now(connection)
            late = and_(BATCHES.c.status.in_(("validating", "in_progress")), BATCHES.c.expires_at <= now)
            for batch in _lock_batches(connection, late):
                values = {"status": "finalizing", "outcome": "expired", "finalizing_at": now}
                set_batch(connection, batch["id"], values | end_lines(connection, batch))

    def results(self, batch_id: str, after: int, limit: int) -> Sequence[Row]:
        """Return the lines of a batch behind the one numbered ``after``, in order."""
        with self._database.read() as connection:
            query = select(*LINES.c["number", "custom_id", "ok", "result"])
            query = query.where(LINES.c.batch_id == batch_id, LINES.c.number > after)
            return connection.execute(query.order_by(LINES.c.number).limit(limit)).mappings().all()

    def running_batches(self) -> tuple[float, Sequence[Row]]:
        """Return the time and the batches in progress, in the order in which their lines run.

        Beside its columns each has ``num_suspects``: its lines that may be what ends the engine.
        """
        with self._database.read() as connection:
            suspects = select(func.count()).where(_pending(BATCHES.c.id), IS_SUSPECT)
            query = self._in_progress(BATCHES, suspects.scalar_subquery().label("num_suspects"))
            return self._database.now(connection), connection.execute(query).mappings().all()

    def pending_lines(
        self,
        limit: int,
        *,
        held: AbstractSet[LineKey] = frozenset(),
        with_suspect: bool = True,
        first: Mapping[str, int] | None = None,
        shares: LineShares | None = None,
    ) -> list[PendingLine]:
        """Return the lines to run next: of each caller those of its batch that expires first, in the file's order.

        Args:
            limit: Most lines.
            held: Lines that run already.
            with_suspect: Return one line that may be what ends the engine, too. To find out which one does, only one of
                them runs at a time.
            first: Number of lines, by batch, that come before all others.
            shares: Chooses the caller of each next line, and is told of all lines that are returned; None: the next
                line is of the batch that expires first, of any caller.
        """
        first = first or {}
        found: dict[LineKey, PendingLine] = {}
        with self._database.read() as connection:
            batches = connection.execute(
                self._in_progress(*BATCHES.c["id", "endpoint", "input_file_id", "caller"])
            ).mappings()
            able = [batch for batch in batches if not self.is_put_off(batch["id"])]
            callers = dict.fromkeys(batch["caller"] for batch in able)
            turns = [(batch, first[batch["id"]]) for batch in able if batch["id"] in first]
            if len(callers) <= 1 or shares is None:
                turns += [(batch, limit) for batch in able]
            for batch, most in turns:
                room = min(most, limit - len(found))
                if room > 0:
                    lines = _pending_of(connection, batch, room, held | found.keys(), with_suspect)
                    with_suspect = with_suspect and not any(line.is_suspect for line in lines)
                    found |= {line.key: line for line in lines}
            if shares is not None:
                shares.begin(callers)
                for line in found.values():
                    shares.take(line)
                if len(callers) > 1:
                    found |= _in_turn(connection, able, limit - len(found), held | found.keys(), with_suspect, shares)
        return list(found.values())

    def save(self, results: Sequence[LineResult]) -> list[LineKey]:
        """Write results; return the lines among them that had one, or whose batch has ended: these results are dropped.

        A batch of which every line has its result goes on to be finalized in the same transaction.
        """
        with self.write() as connection:
            ids = {result.key[0] for result in results}
            batches = _lock_batches(connection, BATCHES.c.id.in_(ids))
            lost: list[LineKey] = []
            added: dict[str, Counter[str]] = {batch_id: Counter() for batch_id in ids}
            for result in results:
                done = {"state": LineState.DONE, "ok": result.ok, "result": result.text}
                if not connection.execute(update(LINES).where(_pending(*result.key)).values(done)).rowcount:
                    lost.append(result.key)
                    continue
                counts = added[result.key[0]]
                counts["completed" if result.ok else "failed"] += 1
                counts["input_tokens"] += result.num_input_tokens
                counts["cached_tokens"] += result.num_cached_tokens
                counts["output_tokens"] += result.num_output_tokens
            for batch in batches:
                if counts := added[batch["id"]]:
                    values = {**{name: batch[name] + number for name, number in counts.items()}, "problem": None}
                    num_done = batch["completed"] + batch["failed"] + counts["completed"] + counts["failed"]
                    if num_done == batch["total"] and batch["status"] == "in_progress":
                        values |= {"status": "finalizing", "finalizing_at": self._database.now(connection)}
                    set_batch(connection, batch["id"], values)
            return lost

    def escalate(self, keys: Sequence[LineKey]) -> None:
        """Note that lines run as latency-sensitive requests from now on."""
        with self.write() as connection:
            for batch in _lock_batches(connection, BATCHES.c.id.in_({key[0] for key in keys})):
                numbers = [number for batch_id, number in keys if batch_id == batch["id"]]
                calm = and_(_pending(batch["id"]), LINES.c.number.in_(numbers), ~LINES.c.escalated)
                count = connection.execute(update(LINES).where(calm).values(escalated=True)).rowcount
                set_batch(connection, batch["id"], {"escalated": batch["escalated"] + count})

    def note_engine_stops(self, key: LineKey, number: int) -> None:
        """Note how often the engine has ended while a line ran."""
        with self.write() as connection:
            connection.execute(update(LINES).where(_pending(*key)).values(engine_stops=number))

    def _check_fence(self, connection: Connection) -> None:
        # The row stays as it is until the transaction ends.
        query = select(OWNERS.c.fence).where(OWNERS.c.model == self._model).with_for_update(read=True)
        if connection.execute(query).scalar() != self._fence:
            raise NotOwner(f"another server has taken over the batches for {self._model!r}")

    def _in_progress(self, *columns: Any) -> Any:
        is_ours = and_(BATCHES.c.status == "in_progress", BATCHES.c.model == self._model)
        return select(*columns).where(is_ours).order_by(BATCHES.c.expires_at, BATCHES.c.id)


def _in_turn(
    connection: Connection,
    batches: Sequence[Row],
    limit: int,
    held: AbstractSet[LineKey],
    with_suspect: bool,
    shares: LineShares,
) -> dict[LineKey, PendingLine]:
    """Return pending lines of several callers, in the order that their shares say."""
    found: dict[LineKey, PendingLine] = {}
    queues: dict[Caller, Iterator[PendingLine]] = {}
    for caller in {batch["caller"] for batch in batches}:
        own = [batch for batch in batches if batch["caller"] == caller]
        queues[caller] = itertools.chain.from_iterable(
            _pending_of(connection, batch, limit, held, with_suspect) for batch in own
        )
    while queues and len(found) < limit:
        caller = shares.next(queues)
        line = next(queues[caller], None)
        if line is None:
            del queues[caller]
        elif with_suspect or not line.is_suspect:
            with_suspect &= not line.is_suspect
            found[line.key] = line
            shares.take(line)
    return found


def _pending_of(
    connection: Connection, batch: Row, limit: int, held: AbstractSet[LineKey], with_suspect: bool
) -> list[PendingLine]:
    """Return pending lines of a batch, without those that are held: one suspect at most, and first."""
    num_held = sum(batch_id == batch["id"] for batch_id, _ in held)

    def found(is_suspect: ColumnElement[bool], most: int) -> list[PendingLine]:
        query = select(*_PENDING_COLUMNS).where(_pending(batch["id"]), is_suspect).order_by(LINES.c.number)
        rows = connection.execute(query.limit(most + num_held)).mappings()
        of_batch = {name: batch[name] for name in ("endpoint", "input_file_id", "caller")}
        lines = [PendingLine(**row, **of_batch) for row in rows]
        return [line for line in lines if line.key not in held][:most]

    lines = found(IS_SUSPECT, 1) if with_suspect else []
    return lines + found(~IS_SUSPECT, limit - len(lines))


def _pending(batch_id: str | ColumnElement[str], number: int | None = None) -> ColumnElement[bool]:
    lines = and_(LINES.c.batch_id == batch_id, LINES.c.state == LineState.PENDING)
    return lines if number is None else and_(lines, LINES.c.number == number)


def _locked(connection: Connection, batch_id: str, *statuses: str) -> Row | None:
    """Lock a batch and return it; None if it is in another state."""
    batch = get_row(connection, BATCHES, batch_id, lock=True)
    return batch if batch["status"] in statuses else None


def _lock_batches(connection: Connection, where: ColumnElement[bool]) -> Sequence[Row]:
    """Lock batches whose lines the transaction will lock; in this order, so that no two wait for each other."""
    return connection.execute(select(BATCHES).where(where).order_by(BATCHES.c.id).with_for_update()).mappings().all()
