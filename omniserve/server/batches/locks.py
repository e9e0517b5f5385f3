"""The locks of the batches of a model, which go with the process that holds them.

For SQLite it is ``flock`` on a file beside the database, for PostgreSQL an advisory lock of a connection. Both block:
call them in a thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from omniserve.server.batches.database import Database, StorageError

# PostgreSQL ends a session that shows no sign of life for so long: the lock of a frozen owner, or of a lost machine.
_PG_GONE_AFTER_S = 20


class FileLock:
    """A lock by ``flock``, which goes with the process; its file stays.

    Every function raises StorageError if the file cannot be opened or locked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def acquire(self) -> bool:
        """Try to get the lock; False if another process has it."""
        self.release()
        try:
            self._file = self._path.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        except OSError as error:
            self.release()
            raise StorageError(
                f"cannot lock {self._path}: {error.strerror or error}; make it writable, or choose a --data-dir on a "
                "local disk"
            ) from error
        return self.is_held()

    def is_held(self) -> bool:
        """Tell whether this process still has the lock."""
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False  # it was removed, so another process can lock a new one

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._file is not None:
            self._file.close()
        self._file = None


class AdvisoryLock:
    """A lock of PostgreSQL, which goes with the connection that holds it; that serves nothing else.

    Every function raises StorageError if the database does not work.
    """

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        digest = hashlib.sha256(name.encode()).digest()
        self._key = {"high": int.from_bytes(digest[:4]) >> 1, "low": int.from_bytes(digest[4:8]) >> 1}
        self._connection: Connection | None = None

    def acquire(self) -> bool:
        """Try to get the lock; False if another process has it."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            return self._is("select pg_try_advisory_lock(:high, :low)")
        except StorageError:
            self.release()
            raise

    def is_held(self) -> bool:
        """Tell whether this process still has the lock."""
        try:
            return self._connection is not None and self._is(
                "select exists (select from pg_locks where locktype = 'advisory' and granted and objsubid = 2 "
                "and pid = pg_backend_pid() and classid = :high and objid = :low)"
            )
        except StorageError:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back, if it is held."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # PostgreSQL sees the end of a connection a little later, and frees the locks then.
            with connection, suppress(SQLAlchemyError):  # of a connection that broke it frees them by itself
                connection.execute(select(func.pg_advisory_unlock_all()))

    def _connect(self) -> Connection:
        connection = self._database.connect()
        settings = {
            "idle_session_timeout": f"{_PG_GONE_AFTER_S}s",
            "tcp_keepalives_idle": str(_PG_GONE_AFTER_S // 2),
            "tcp_keepalives_interval": str(_PG_GONE_AFTER_S // 6),
            "tcp_keepalives_count": "3",
        }
        # Not every version of PostgreSQL has each.
        query = text("select set_config(name, :value, false) from pg_settings where name = :name")
        with self._database.storage_errors():
            for name, value in settings.items():
                connection.execute(query, {"name": name, "value": value})
        return connection

    def _is(self, query: str) -> bool:
        assert self._connection is not None
        with self._database.storage_errors():
            return bool(self._connection.execute(text(query), self._key).scalar_one())


Lock = FileLock | AdvisoryLock


def make_lock(database: Database, model: str) -> Lock:
    """Return the lock of the batches of a model, not acquired."""
    if database.file is None:
        return AdvisoryLock(database, f"omniserve batches of {model}")
    # By digest, as a model's name may be a path.
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return FileLock(database.file.with_name(f"{database.file.name}.{digest}.lock"))
