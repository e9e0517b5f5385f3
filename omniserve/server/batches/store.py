"""Files and batches, which outlive the process, and what clients do with them: create, list, read, cancel, delete.

A file on the disk has one row: among the files that are known, or among the *leftovers*, which clients do not see: not
yet, or not any more. A sweep removes leftovers.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, Table, and_, delete, insert, select, tuple_, update

from omniserve.server.batches.database import (
    BATCHES,
    FILES,
    LEFTOVERS,
    LINES,
    UNFINISHED,
    Database,
    LineState,
    Row,
    StorageError,
)
from omniserve.server.batches.files import BatchSettings, FileFolder, refuse_network_folder
from omniserve.server.errors import ApiError

logger = logging.getLogger(__name__)

# A process that has not made a file known so long after it announced it is taken for dead.
_WRITE_TIME_S = 3600.0


def new_id(prefix: str) -> str:
    """Return a fresh id."""
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewFile:
    """A file that is to be known, once it lies on the disk, complete."""

    id: str = field(default_factory=lambda: new_id("file-"))
    filename: str
    purpose: str
    num_bytes: int = 0
    """Size; set when it is written."""
    expires_after_s: float | None = None
    caller: str | None = None
    """The API key that it belongs to; None: there are no keys."""


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
    """The files and batches of clients, which outlive the process.

    Every function blocks: call it in a thread. All raise StorageError when database or disk do not work, and ApiError
    for an id that does not exist. For a ``caller`` there is only what belongs to that API key; for None, everything.
    """

    def __init__(self, database: Database, files: FileFolder) -> None:
        self.database = database
        self.files = files

    @classmethod
    def open(cls, settings: BatchSettings) -> Store:
        """Open the store, and make it if it is not there.

        Raises:
            StorageError: The folder cannot be written, or the database is none, does not answer, or is SQLite on a
                network file system.
        """
        files = FileFolder(settings.folder / "files")
        url = settings.url
        if url.get_backend_name() == "sqlite":
            refuse_network_folder(Path(url.database or ".").absolute().parent)
        return cls(Database(url), files)

    def add_file(self, new: NewFile, parts: Iterable[bytes]) -> Row:
        """Write a file and make it known."""
        file = self.write_file(new, parts)
        try:
            with self.database.write() as connection:
                make_known(connection, file, self.database.now(connection))
                return get_row(connection, FILES, file.id)
        except StorageError:
            self.discard(file.id)
            raise

    def write_file(self, new: NewFile, parts: Iterable[bytes]) -> NewFile:
        """Write a file that is to be known; return it with its size.

        It has to be made known, or discarded. If the process dies before, a sweep removes it an hour later.
        """
        with self.database.write() as connection:
            remove_after = self.database.now(connection) + _WRITE_TIME_S
            connection.execute(insert(LEFTOVERS).values(id=new.id, remove_after=remove_after))
        return replace(new, num_bytes=self.files.write(new.id, parts))

    def discard(self, *file_ids: str) -> None:
        """Remove leftovers, these files too unless they were made known; soon, if that does not work at once."""
        try:
            with self.database.write() as connection:
                connection.execute(update(LEFTOVERS).where(LEFTOVERS.c.id.in_(file_ids)).values(remove_after=0.0))
            self._remove_leftovers()
        except StorageError as error:
            logger.warning("files: %s; what was not made known is removed later", error)

    def sweep(self) -> None:
        """Forget files whose time is over, and remove those that clients do not see any more, or never did.

        What fails is tried again by the next sweep.
        """
        with self.database.write() as connection:
            over = select(FILES.c.id).where(FILES.c.expires_at <= self.database.now(connection))
            # First locked, so that no batch of them comes into being; then asked which batches read them.
            for file_id in connection.execute(over.order_by(FILES.c.id).with_for_update()).scalars().all():
                if not _is_read(connection, file_id):
                    _forget_file(connection, file_id)
        self._remove_leftovers()
        self.files.remove_abandoned()

    def file(self, file_id: str, caller: str | None = None) -> Row:
        """Return a file."""
        with self.database.read() as connection:
            return get_row(connection, FILES, file_id, caller=caller)

    def delete_file(self, file_id: str, caller: str | None = None) -> None:
        """Forget a file, and remove its bytes soon.

        Raises:
            ApiError: A batch still reads it.
        """
        with self.database.write() as connection:
            get_row(connection, FILES, file_id, lock=True, caller=caller)
            if _is_read(connection, file_id):
                raise ApiError(
                    f"a batch that is not finished reads the file {file_id}; cancel it or wait for its end",
                    status=409,
                    code="file_in_use",
                )
            _forget_file(connection, file_id)
        self.discard()

    def create_batch(self, batch: NewBatch) -> Row:
        """Accept a batch; it is checked in the background.

        Raises:
            ApiError: The input file is for something else, or has expired.
        """
        param = "input_file_id"
        with self.database.write() as connection:
            # Locked, so that it is not deleted while the batch comes into being.
            file = get_row(connection, FILES, batch.input_file_id, lock=True, param=param, caller=batch.caller)
            if file["purpose"] != "batch":
                raise ApiError(
                    f"the file {file['id']} has the purpose {file['purpose']!r}; upload it with the purpose 'batch'",
                    param=param,
                    code="invalid_purpose",
                )
            now = self.database.now(connection)
            if file["expires_at"] is not None and file["expires_at"] <= now:
                raise ApiError(f"the file {file['id']} has expired; upload it again", param=param, code="file_expired")
            values: dict[str, Any] = asdict(batch) | {"id": new_id("batch_"), "created_at": now}
            values["expires_at"] = now + values.pop("window_s")
            metadata = values.pop("metadata")
            values["user_metadata"] = None if metadata is None else json.dumps(metadata)
            connection.execute(insert(BATCHES).values(status="validating", outcome="completed", **values))
            return get_row(connection, BATCHES, values["id"])

    def batch(self, batch_id: str, caller: str | None = None) -> Row:
        """Return a batch."""
        with self.database.read() as connection:
            return get_row(connection, BATCHES, batch_id, caller=caller)

    def cancel_batch(self, batch_id: str, caller: str | None = None) -> Row:
        """End a batch: what has a result keeps it, no other line is run. Cancelling twice is the same as once.

        Raises:
            ApiError: It has come to another end.
        """
        with self.database.write() as connection:
            batch = get_row(connection, BATCHES, batch_id, lock=True, caller=caller)
            if batch["status"] in ("cancelling", "cancelled"):
                return batch
            if batch["status"] not in UNFINISHED:
                raise ApiError(
                    f"the batch {batch_id} is {batch['status']}, so it cannot be cancelled any more",
                    status=409,
                    code="batch_not_cancellable",
                )
            values: dict[str, Any] = {"status": "cancelling", "cancelling_at": self.database.now(connection)}
            if batch["status"] != "finalizing":  # then every line has its result, and keeps it
                values |= {"outcome": "cancelled"} | end_lines(connection, batch)
            set_batch(connection, batch_id, values)
            return get_row(connection, BATCHES, batch_id)

    def page(
        self,
        table: Table,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        purpose: str | None = None,
        caller: str | None = None,
    ) -> Page:
        """Return a page of the files or the batches; ``after`` is the last id of the page before."""
        at, row_id = table.c.created_at, table.c.id
        query = _rows_of(table, caller)
        if purpose is not None:
            query = query.where(table.c.purpose == purpose)
        with self.database.read() as connection:
            if after is not None:
                last = get_row(connection, table, after, param="after", caller=caller)
                place, last_place = tuple_(at, row_id), tuple_(last["created_at"], last["id"])
                query = query.where(place < last_place if newest_first else place > last_place)
            order = (at.desc(), row_id.desc()) if newest_first else (at, row_id)
            rows = connection.execute(query.order_by(*order).limit(limit + 1)).mappings().all()
        return Page(rows[:limit], len(rows) > limit)

    def _remove_leftovers(self) -> None:
        with self.database.write() as connection:
            due = select(LEFTOVERS.c.id).where(LEFTOVERS.c.remove_after <= self.database.now(connection))
            for file_id in connection.execute(due.with_for_update(skip_locked=True)).scalars().all():
                self.files.remove(file_id)
                connection.execute(delete(LEFTOVERS).where(LEFTOVERS.c.id == file_id))


def get_row(
    connection: Connection,
    table: Table,
    row_id: str,
    *,
    lock: bool = False,
    param: str | None = None,
    caller: str | None = None,
) -> Row:
    """Return a file or a batch, locked until the transaction ends if ``lock``.

    Raises:
        ApiError: There is none that belongs to the caller; the error names the request's field ``param``.
    """
    query = _rows_of(table, caller).where(table.c.id == row_id)
    row = None
    if row_id.isascii() and row_id.isprintable():  # as ids are; not every database takes every other text
        row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        kind = "file" if table is FILES else "batch"
        raise ApiError(f"there is no {kind} {row_id!r}", status=404, param=param, code=f"{kind}_not_found")
    return row


def _rows_of(table: Table, caller: str | None) -> Select[Any]:
    query = select(table)
    return query if caller is None else query.where(table.c.caller == caller)


def set_batch(connection: Connection, batch_id: str, values: Mapping[str, Any]) -> None:
    """Change columns of a batch."""
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(**values))


def end_lines(connection: Connection, batch: Row) -> dict[str, Any]:
    """End the lines without a result of a batch that is locked; return what becomes of the batch's counts."""
    open_lines = and_(LINES.c.batch_id == batch["id"], LINES.c.state != LineState.DONE)
    ended = connection.execute(update(LINES).where(open_lines).values(state=LineState.DONE, ok=False)).rowcount
    return {"failed": batch["failed"] + ended}


def make_known(connection: Connection, file: NewFile, now: float) -> None:
    """Make a file known within a transaction.

    Raises:
        StorageError: It was not announced, or so long ago that it may have been removed.
    """
    if not connection.execute(delete(LEFTOVERS).where(LEFTOVERS.c.id == file.id)).rowcount:
        raise StorageError(
            f"writing the file {file.id} took longer than {_WRITE_TIME_S:g} s; send it again",
            status=503,
            code="storage_slow",
        )
    values = asdict(file)
    after_s = values.pop("expires_after_s")
    expires_at = None if after_s is None else now + after_s
    connection.execute(insert(FILES).values(created_at=now, expires_at=expires_at, **values))


def _forget_file(connection: Connection, file_id: str) -> None:
    """Make a leftover of a file that is known."""
    connection.execute(delete(FILES).where(FILES.c.id == file_id))
    connection.execute(insert(LEFTOVERS).values(id=file_id, remove_after=0.0))


def _is_read(connection: Connection, file_id: str) -> bool:
    """Tell whether a batch that is not finished reads a file."""
    query = select(BATCHES.c.id).where(BATCHES.c.input_file_id == file_id, BATCHES.c.status.in_(UNFINISHED))
    return connection.execute(query.limit(1)).first() is not None
