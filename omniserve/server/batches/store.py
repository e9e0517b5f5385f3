"""Files and batches in the database: what clients create, list, cancel and delete, and how a batch goes its way.

Every function is one transaction, and blocks: call it in a thread.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Table, and_, delete, insert, or_, select, update

from omniserve.server.batches.database import Database, StorageError
from omniserve.server.batches.lines import CheckedLine, LineFault
from omniserve.server.batches.tables import BATCHES, FILES, LEFTOVERS, LINES, UNFINISHED, LineState
from omniserve.server.errors import ApiError

_ROWS_PER_INSERT = 1000
# Who has not made a file known so long after it was announced does not live any more.
_WRITE_TIME_S = 3600.0

Row = RowMapping
"""A row of a table, by column name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewFile:
    """A file that was announced, lies on the disk, complete, and is to be known."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    expires_after_s: float | None = None
    caller: str | None = None
    """The API key that it belongs to; None: nobody's, as where no keys are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewBatch:
    """What a client asks for."""

    model: str
    """The model that is to run it, by the name under which it is served."""
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: float
    metadata: Mapping[str, str] | None
    outputs_expire_after_s: float | None = None
    caller: str | None = None
    may_escalate: bool = True
    """Whether its lines may run as latency-sensitive requests."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list."""

    rows: Sequence[Row]
    has_more: bool


def new_id(prefix: str) -> str:
    """Return a fresh id."""
    return f"{prefix}{uuid.uuid4().hex}"


class Store:
    """Files and batches.

    All functions raise StorageError when the database does not work. For a ``caller`` there is only what belongs to
    that API key; for None, everything.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def announce_file(self, file_id: str) -> None:
        """Say that a file will be written, so that it is removed again if its writer dies."""
        with self._database.write() as connection:
            at = self._database.now(connection) + _WRITE_TIME_S
            connection.execute(insert(LEFTOVERS).values(id=file_id, remove_after=at))

    def discard_file(self, file_id: str) -> None:
        """Let the next sweep remove a file that was announced; one that is known stays."""
        with self._database.write() as connection:
            connection.execute(update(LEFTOVERS).where(LEFTOVERS.c.id == file_id).values(remove_after=0.0))

    def sweep(self, remove: Callable[[str], None]) -> None:
        """Remove files that are nobody's.

        Args:
            remove: Removes one, which may be gone already.

        Raises:
            StorageError: What ``remove`` raises, too; it is tried again by the next sweep.
        """
        with self._database.write() as connection:
            due = select(LEFTOVERS.c.id).where(LEFTOVERS.c.remove_after <= self._database.now(connection))
            for file_id in connection.execute(due.with_for_update(skip_locked=True)).scalars().all():
                remove(file_id)
                connection.execute(delete(LEFTOVERS).where(LEFTOVERS.c.id == file_id))

    def add_file(self, file: NewFile) -> Row:
        """Make a file known.

        Raises:
            StorageError: It was not announced, or so long ago that it may have been removed.
        """
        with self._database.write() as connection:
            _insert_file(connection, file, self._database.now(connection))
            return _get(connection, FILES, file.id)

    def file(self, file_id: str, caller: str | None = None) -> Row:
        """Return a file.

        Raises:
            ApiError: There is none.
        """
        with self._database.read() as connection:
            return _get(connection, FILES, file_id, caller=caller)

    def list_files(
        self, *, limit: int, after: str | None, newest_first: bool, purpose: str | None, caller: str | None = None
    ) -> Page:
        """Return a page of the files; ``after`` is the last id of the page before.

        Raises:
            ApiError: There is no file ``after``.
        """
        with self._database.read() as connection:
            return _page(connection, FILES, limit, after, newest_first, caller, purpose)

    def delete_file(self, file_id: str, caller: str | None = None) -> None:
        """Forget a file; the next sweep removes its bytes.

        Raises:
            ApiError: There is none, or a batch still reads it.
        """
        with self._database.write() as connection:
            _get(connection, FILES, file_id, lock=True, caller=caller)
            if _in_use(connection, file_id):
                raise ApiError(
                    f"a batch that is not finished reads the file {file_id}; cancel it or wait for its end",
                    status=409,
                    code="file_in_use",
                )
            _forget_files(connection, [file_id])

    def forget_expired_files(self) -> None:
        """Forget files whose time is over and that no batch reads."""
        with self._database.write() as connection:
            over = select(FILES.c.id).where(FILES.c.expires_at <= self._database.now(connection))
            # First locked, so that no batch of them comes into being; then asked who reads them.
            ids = connection.execute(over.order_by(FILES.c.id).with_for_update()).scalars().all()
            _forget_files(connection, [file_id for file_id in ids if not _in_use(connection, file_id)])

    def create_batch(self, batch: NewBatch) -> Row:
        """Accept a batch; it is checked in the background.

        Raises:
            ApiError: There is no such input file, or it is for something else.
        """
        with self._database.write() as connection:
            # Locked, so that it is not deleted while the batch comes into being.
            file = _get(connection, FILES, batch.input_file_id, lock=True, param="input_file_id", caller=batch.caller)
            if file["purpose"] != "batch":
                raise ApiError(
                    f"the file {file['id']} has the purpose {file['purpose']!r}; upload it with the purpose 'batch'",
                    param="input_file_id",
                    code="invalid_purpose",
                )
            now, batch_id = self._database.now(connection), new_id("batch_")
            if file["expires_at"] is not None and file["expires_at"] <= now:
                raise ApiError(
                    f"the file {file['id']} has expired; upload it again", param="input_file_id", code="file_expired"
                )
            connection.execute(
                insert(BATCHES).values(
                    id=batch_id,
                    status="validating",
                    outcome="completed",
                    model=batch.model,
                    endpoint=batch.endpoint,
                    input_file_id=batch.input_file_id,
                    completion_window=batch.completion_window,
                    user_metadata=None if batch.metadata is None else json.dumps(dict(batch.metadata)),
                    created_at=now,
                    expires_at=now + batch.window_s,
                    outputs_expire_after_s=batch.outputs_expire_after_s,
                    caller=batch.caller,
                    may_escalate=batch.may_escalate,
                )
            )
            return _get(connection, BATCHES, batch_id)

    def batch(self, batch_id: str, caller: str | None = None) -> Row:
        """Return a batch.

        Raises:
            ApiError: There is none.
        """
        with self._database.read() as connection:
            return _get(connection, BATCHES, batch_id, caller=caller)

    def list_batches(self, *, limit: int, after: str | None, caller: str | None = None) -> Page:
        """Return a page of the batches, newest first.

        Raises:
            ApiError: There is no batch ``after``.
        """
        with self._database.read() as connection:
            return _page(connection, BATCHES, limit, after, True, caller)

    def cancel_batch(self, batch_id: str, caller: str | None = None) -> Row:
        """End a batch: what has a result keeps it, no other line is run. Cancelling twice is the same as once.

        Raises:
            ApiError: There is none, or it has come to another end.
        """
        with self._database.write() as connection:
            batch = _get(connection, BATCHES, batch_id, lock=True, caller=caller)
            if batch["status"] in ("cancelling", "cancelled"):
                return batch
            if batch["status"] not in UNFINISHED:
                raise ApiError(
                    f"the batch {batch_id} is {batch['status']}, so it cannot be cancelled any more",
                    status=409,
                    code="batch_not_cancellable",
                )
            now = self._database.now(connection)
            values: dict[str, Any] = {"status": "cancelling", "cancelling_at": now, "not_before": 0.0}
            if batch["status"] != "finalizing":  # then every line has its result, and keeps it
                values |= {"outcome": "cancelled"}
                values |= _end_lines(connection, batch)
            _set(connection, batch_id, values)
            return _get(connection, BATCHES, batch_id)

    def expire_batches(self) -> list[str]:
        """End the batches whose window is over; return their ids."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            late = select(BATCHES).where(
                BATCHES.c.status.in_(("validating", "in_progress")), BATCHES.c.expires_at <= now
            )
            batches = connection.execute(late.order_by(BATCHES.c.id).with_for_update()).mappings().all()
            for batch in batches:
                values = {"status": "finalizing", "outcome": "expired", "finalizing_at": now, "not_before": 0.0}
                _set(connection, batch["id"], values | _end_lines(connection, batch))
            return [batch["id"] for batch in batches]

    def claim_batch(self, owner: str, model: str, lease_s: float) -> Row | None:
        """Take the batch that has waited longest to be validated, for this model, or finalized; None without one."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            # The owner itself works on one at a time: what it still has was given back, but that failed.
            free = or_(BATCHES.c.owner.is_(None), BATCHES.c.owner == owner, BATCHES.c.lease_until < now)
            own = and_(BATCHES.c.status == "validating", BATCHES.c.model == model)
            query = (
                select(BATCHES)
                .where(or_(BATCHES.c.status.in_(("finalizing", "cancelling")), own))
                .where(free, BATCHES.c.not_before <= now)
                .order_by(BATCHES.c.created_at)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            batch = connection.execute(query).mappings().first()
            if batch is not None:
                _set(connection, batch["id"], {"owner": owner, "lease_until": now + lease_s})
            return batch

    def accept_lines(self, batch_id: str, owner: str, lines: Sequence[CheckedLine]) -> bool:
        """Enter the lines of a batch that was found right; False if it is no longer the owner's to validate."""
        with self._database.write() as connection:
            if not self._is_owned(connection, batch_id, owner, ("validating",)):
                return False
            for i in range(0, len(lines), _ROWS_PER_INSERT):
                rows = [
                    {
                        "batch_id": batch_id,
                        "number": line.number,
                        "custom_id": line.custom_id,
                        "start": line.start,
                        "length": line.length,
                    }
                    for line in lines[i : i + _ROWS_PER_INSERT]
                ]
                # With RETURNING it is one statement. Many small ones psycopg would send in a pipeline, whose end
                # PostgreSQL awaits for ever if this process is frozen.
                connection.execute(insert(LINES).returning(LINES.c.number), rows)
            values = {"status": "in_progress", "total": len(lines), "owner": None, "problem": None}
            _set(connection, batch_id, values | {"in_progress_at": self._database.now(connection)})
            return True

    def fail_batch(self, batch_id: str, owner: str, faults: Sequence[LineFault]) -> bool:
        """End a batch whose input is wrong; False if it is no longer the owner's to validate."""
        with self._database.write() as connection:
            if not self._is_owned(connection, batch_id, owner, ("validating",)):
                return False
            values = {"status": "failed", "errors": json.dumps([fault.as_dict() for fault in faults]), "owner": None}
            _set(connection, batch_id, values | {"failed_at": self._database.now(connection), "problem": None})
            return True

    def finish_batch(self, batch_id: str, owner: str, output: NewFile | None, errors: NewFile | None) -> bool:
        """End a batch whose result files lie on the disk, and forget its lines; False if it is not the owner's."""
        with self._database.write() as connection:
            if not self._is_owned(connection, batch_id, owner, ("finalizing", "cancelling")):
                return False
            batch, now = _get(connection, BATCHES, batch_id), self._database.now(connection)
            status = "cancelled" if batch["status"] == "cancelling" else batch["outcome"]
            values: dict[str, Any] = {"status": status, f"{status}_at": now, "owner": None, "problem": None}
            for column, file in (("output_file_id", output), ("error_file_id", errors)):
                if file is not None:
                    _insert_file(connection, file, now)
                    values[column] = file.id
            _set(connection, batch_id, values)
            connection.execute(delete(LINES).where(LINES.c.batch_id == batch_id))
            return True

    def postpone_batch(self, batch_id: str, owner: str, problem: str, delay_s: float) -> None:
        """Give a batch back that could not be worked on, and say why."""
        with self._database.write() as connection:
            not_before = self._database.now(connection) + delay_s
            values = {"owner": None, "problem": problem, "not_before": not_before}
            mine = and_(BATCHES.c.id == batch_id, BATCHES.c.owner == owner)
            connection.execute(update(BATCHES).where(mine).values(values))

    def results(self, batch_id: str, after: int, limit: int) -> Sequence[Row]:
        """Return the lines of a batch behind the one numbered ``after``, in order."""
        with self._database.read() as connection:
            query = select(*LINES.c["number", "custom_id", "ok", "result"])
            query = query.where(LINES.c.batch_id == batch_id, LINES.c.number > after)
            return connection.execute(query.order_by(LINES.c.number).limit(limit)).mappings().all()

    def running_batches(self) -> tuple[float, Sequence[Row]]:
        """Return the time and all batches in progress."""
        with self._database.read() as connection:
            rows = connection.execute(select(BATCHES).where(BATCHES.c.status == "in_progress")).mappings().all()
            return self._database.now(connection), rows

    def _is_owned(self, connection: Connection, batch_id: str, owner: str, statuses: tuple[str, ...]) -> bool:
        query = select(BATCHES.c.id).where(BATCHES.c.id == batch_id, BATCHES.c.owner == owner)
        return connection.execute(query.where(BATCHES.c.status.in_(statuses)).with_for_update()).first() is not None


def _forget_files(connection: Connection, ids: Sequence[str]) -> None:
    for file_id in ids:
        connection.execute(delete(FILES).where(FILES.c.id == file_id))
        connection.execute(insert(LEFTOVERS).values(id=file_id, remove_after=0.0))


def _insert_file(connection: Connection, file: NewFile, now: float) -> None:
    if not connection.execute(delete(LEFTOVERS).where(LEFTOVERS.c.id == file.id)).rowcount:
        raise StorageError(
            f"writing the file {file.id} took longer than {_WRITE_TIME_S:g} s; send it again",
            status=503,
            code="storage_slow",
        )
    connection.execute(
        insert(FILES).values(
            id=file.id,
            created_at=now,
            expires_at=None if file.expires_after_s is None else now + file.expires_after_s,
            filename=file.filename,
            purpose=file.purpose,
            num_bytes=file.num_bytes,
            caller=file.caller,
        )
    )


def _end_lines(connection: Connection, batch: Row) -> dict[str, Any]:
    """End the lines without a result; return what becomes of the batch's counts."""
    open_lines = and_(LINES.c.batch_id == batch["id"], LINES.c.state != LineState.DONE)
    ended = connection.execute(
        update(LINES).where(open_lines).values(state=LineState.DONE, ok=False, owner=None)
    ).rowcount
    return {"failed": batch["failed"] + ended}


def _in_use(connection: Connection, file_id: str) -> bool:
    query = select(BATCHES.c.id).where(BATCHES.c.input_file_id == file_id, BATCHES.c.status.in_(UNFINISHED))
    return connection.execute(query.limit(1)).first() is not None


def _set(connection: Connection, batch_id: str, values: Mapping[str, Any]) -> None:
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(**values))


def _owned(table: Table, caller: str | None) -> Select[Any]:
    query = select(table)
    return query if caller is None else query.where(table.c.caller == caller)


def _get(
    connection: Connection,
    table: Table,
    row_id: str,
    *,
    lock: bool = False,
    param: str | None = None,
    caller: str | None = None,
) -> Row:
    query = _owned(table, caller).where(table.c.id == row_id)
    row = None
    if row_id.isascii() and row_id.isprintable():  # as ids are; not every database takes every other text
        row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        kind = "file" if table is FILES else "batch"
        raise ApiError(f"there is no {kind} {row_id!r}", status=404, param=param, code=f"{kind}_not_found")
    return row


def _page(
    connection: Connection,
    table: Table,
    limit: int,
    after: str | None,
    newest_first: bool,
    caller: str | None,
    purpose: str | None = None,
) -> Page:
    at, row_id = table.c.created_at, table.c.id
    query = _owned(table, caller)
    if purpose is not None:
        query = query.where(table.c.purpose == purpose)
    if after is not None:
        last = _get(connection, table, after, param="after", caller=caller)
        if newest_first:
            behind = or_(at < last["created_at"], and_(at == last["created_at"], row_id < last["id"]))
        else:
            behind = or_(at > last["created_at"], and_(at == last["created_at"], row_id > last["id"]))
        query = query.where(behind)
    order = (at.desc(), row_id.desc()) if newest_first else (at, row_id)
    rows = connection.execute(query.order_by(*order).limit(limit + 1)).mappings().all()
    return Page(rows[:limit], len(rows) > limit)
