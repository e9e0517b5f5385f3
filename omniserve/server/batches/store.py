"""What clients do: files and batches that they create, list, read, cancel and delete.

Every function is one transaction, and blocks: call it in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, and_, insert, or_

from omniserve.server.batches.database import Database
from omniserve.server.batches.leftovers import NewFile, forget_files, is_read, make_known
from omniserve.server.batches.rows import Row, end_lines, get_row, new_id, rows_of, set_batch
from omniserve.server.batches.tables import BATCHES, FILES, UNFINISHED
from omniserve.server.errors import ApiError


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


class Store:
    """The files and batches of clients.

    All functions raise StorageError when the database does not work. For a ``caller`` there is only what belongs to
    that API key; for None, everything.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_file(self, file: NewFile) -> Row:
        """Make a file known.

        Raises:
            StorageError: It was not announced, or so long ago that it may have been removed.
        """
        with self._database.write() as connection:
            make_known(connection, file, self._database.now(connection))
            return get_row(connection, FILES, file.id)

    def file(self, file_id: str, caller: str | None = None) -> Row:
        """Return a file.

        Raises:
            ApiError: There is none.
        """
        with self._database.read() as connection:
            return get_row(connection, FILES, file_id, caller=caller)

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
            get_row(connection, FILES, file_id, lock=True, caller=caller)
            if is_read(connection, file_id):
                raise ApiError(
                    f"a batch that is not finished reads the file {file_id}; cancel it or wait for its end",
                    status=409,
                    code="file_in_use",
                )
            forget_files(connection, [file_id])

    def create_batch(self, batch: NewBatch) -> Row:
        """Accept a batch; it is checked in the background.

        Raises:
            ApiError: There is no such input file, or it is for something else.
        """
        with self._database.write() as connection:
            # Locked, so that it is not deleted while the batch comes into being.
            file = get_row(
                connection, FILES, batch.input_file_id, lock=True, param="input_file_id", caller=batch.caller
            )
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
            return get_row(connection, BATCHES, batch_id)

    def batch(self, batch_id: str, caller: str | None = None) -> Row:
        """Return a batch.

        Raises:
            ApiError: There is none.
        """
        with self._database.read() as connection:
            return get_row(connection, BATCHES, batch_id, caller=caller)

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
            batch = get_row(connection, BATCHES, batch_id, lock=True, caller=caller)
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
                values |= end_lines(connection, batch)
            set_batch(connection, batch_id, values)
            return get_row(connection, BATCHES, batch_id)


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
    query = rows_of(table, caller)
    if purpose is not None:
        query = query.where(table.c.purpose == purpose)
    if after is not None:
        last = get_row(connection, table, after, param="after", caller=caller)
        if newest_first:
            behind = or_(at < last["created_at"], and_(at == last["created_at"], row_id < last["id"]))
        else:
            behind = or_(at > last["created_at"], and_(at == last["created_at"], row_id > last["id"]))
        query = query.where(behind)
    order = (at.desc(), row_id.desc()) if newest_first else (at, row_id)
    rows = connection.execute(query.order_by(*order).limit(limit + 1)).mappings().all()
    return Page(rows[:limit], len(rows) > limit)
