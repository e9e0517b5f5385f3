"""Files on the disk that clients do not see: not yet, or not any more. A sweep removes them.

A file has one row: among the leftovers, or among the files that are known. Every function of ``Leftovers`` is one
transaction, and blocks: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update

from omniserve.server.batches.database import Database, StorageError
from omniserve.server.batches.tables import BATCHES, FILES, LEFTOVERS, UNFINISHED

# A process that has not made a file known so long after it announced it is taken for dead.
_WRITE_TIME_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NewFile:
    """A file that was announced, lies on the disk, complete, and is to be known."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    expires_after_s: float | None = None
    caller: str | None = None
    """The API key that it belongs to; None: there are no keys."""


class Leftovers:
    """Files that clients do not see; all functions raise StorageError when the database does not work."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def announce(self, file_id: str) -> None:
        """Say that a file will be written, so that it is removed again if its writer dies."""
        with self._database.write() as connection:
            at = self._database.now(connection) + _WRITE_TIME_S
            connection.execute(insert(LEFTOVERS).values(id=file_id, remove_after=at))

    def discard(self, file_id: str) -> None:
        """Let the next sweep remove a file that was announced; one that is known stays."""
        with self._database.write() as connection:
            connection.execute(update(LEFTOVERS).where(LEFTOVERS.c.id == file_id).values(remove_after=0.0))

    def sweep(self, remove: Callable[[str], None]) -> None:
        """Remove files that are not written any more, and were not made known.

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

    def forget_expired(self) -> None:
        """Forget files whose time is over and that no batch reads."""
        with self._database.write() as connection:
            over = select(FILES.c.id).where(FILES.c.expires_at <= self._database.now(connection))
            # First locked, so that no batch of them comes into being; then asked which batches read them.
            ids = connection.execute(over.order_by(FILES.c.id).with_for_update()).scalars().all()
            forget_files(connection, [file_id for file_id in ids if not is_read(connection, file_id)])


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


def forget_files(connection: Connection, ids: Sequence[str]) -> None:
    """Make leftovers of files that are known, within a transaction."""
    for file_id in ids:
        connection.execute(delete(FILES).where(FILES.c.id == file_id))
        connection.execute(insert(LEFTOVERS).values(id=file_id, remove_after=0.0))


def is_read(connection: Connection, file_id: str) -> bool:
    """Tell whether a batch that is not finished reads a file."""
    query = select(BATCHES.c.id).where(BATCHES.c.input_file_id == file_id, BATCHES.c.status.in_(UNFINISHED))
    return connection.execute(query.limit(1)).first() is not None
