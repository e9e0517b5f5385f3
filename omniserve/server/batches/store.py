"""What lasts, and what clients do with it: files and batches that they create, list, read, cancel and delete.

Every function of ``Store`` is one transaction, and blocks: call it in a thread.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Table, and_, insert, or_, select, update

from omniserve.server.batches.database import Database, StorageError
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.leftovers import Leftovers, NewFile, forget_files, is_read, make_known
from omniserve.server.batches.owner import refuse_network_folder
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.tables import BATCHES, FILES, LINES, UNFINISHED, LineState
from omniserve.server.errors import ApiError

logger = logging.getLogger(__name__)

Row = RowMapping
"""A row of a table, by column name."""


def new_id(prefix: str) -> str:
    """Return a fresh id."""
    return f"{prefix}{uuid.uuid4().hex}"


def rows_of(table: Table, caller: str | None) -> Select[Any]:
    """Select what belongs to an API key; for None, everything."""
    query = select(table)
    return query if caller is None else query.where(table.c.caller == caller)


def get_row(
    connection: Connection,
    table: Table,
    row_id: str,
    *,
    lock: bool = False,
    param: str | None = None,
    caller: str | None = None,
) -> Row:
    """Return a file or a batch.

    Args:
        lock: Until the transaction ends.
        param: Of the request, which an error names.
        caller: The API key that asks for it; None may see everything.

    Raises:
        ApiError: There is none that belongs to the caller.
    """
    query = rows_of(table, caller).where(table.c.id == row_id)
    row = None
    if row_id.isascii() and row_id.isprintable():  # as ids are; not every database takes every other text
        row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        kind = "file" if table is FILES else "batch"
        raise ApiError(f"there is no {kind} {row_id!r}", status=404, param=param, code=f"{kind}_not_found")
    return row


def set_batch(connection: Connection, batch_id: str, values: Mapping[str, Any]) -> None:
    """Change columns of a batch."""
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(**values))


def end_lines(connection: Connection, batch: Row) -> dict[str, Any]:
    """End the lines without a result of a batch that is locked; return what becomes of the batch's counts."""
    open_lines = and_(LINES.c.batch_id == batch["id"], LINES.c.state != LineState.DONE)
    ended = connection.execute(update(LINES).where(open_lines).values(state=LineState.DONE, ok=False)).rowcount
    return {"failed": batch["failed"] + ended}


@dataclass(frozen=True, kw_only=True, slots=True)
class NewBatch:
    """A batch that a client asks for."""

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
    """Lines of the batch may run as latency-sensitive requests."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list."""

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
            values: dict[str, Any] = {"status": "cancelling", "cancelling_at": now}
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


class Storage:
    """Files and batches that outlive the process."""

    def __init__(self, database: Database, files: FileFolder) -> None:
        self.database = database
        self.files = files
        self.store = Store(database)
        self.leftovers = Leftovers(database)

    @classmethod
    def open(cls, settings: BatchSettings) -> Storage:
        """Open the storage, and make it if it is not there.

        Raises:
            StorageError: The folder cannot be written, or the database is none, does not answer, or is SQLite on a
                network file system.
        """
        files = FileFolder(settings.folder / "files")
        url = settings.url
        if url.get_backend_name() == "sqlite":
            refuse_network_folder(Path(url.database or ".").absolute().parent)
        return cls(Database(url), files)

    def write_file(self, parts: Iterable[bytes]) -> tuple[str, int]:
        """Write a file that is to be known; return its id and size.

        It has to be made known, or discarded. If the process dies before, a sweep removes it an hour later.

        Raises:
            StorageError: Disk or database do not work; nothing was kept.
        """
        file_id = new_id("file-")
        self.leftovers.announce(file_id)
        return file_id, self.files.write(file_id, parts)

    def discard(self, *file_ids: str) -> None:
        """Remove files unless they were made known, soon if that does not work at once."""
        try:
            for file_id in file_ids:
                self.leftovers.discard(file_id)
            self.sweep()
        except StorageError as error:
            logger.warning("files: %s; what was not made known is removed later", error)

    def sweep(self) -> None:
        """Remove files that clients do not see any more, or never did.

        Raises:
            StorageError: Disk or database do not work; the next sweep tries again.
        """
        self.leftovers.sweep(self.files.remove)

    def close(self) -> None:
        """Close the database."""
        self.database.close()
