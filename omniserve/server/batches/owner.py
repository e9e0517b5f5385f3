"""The owner: for each database and model, the one server that runs lines.

A server becomes the owner when it gets the lock, which its death frees: for SQLite ``flock`` on a file beside the
database, for PostgreSQL an advisory lock of a connection. Each owner then gets a fencing number that is higher than all
before it, and every write of an owner checks, in its transaction, that there is no higher one. A lock may be lost
without notice (a connection that broke, a machine that was frozen); the fence keeps a former owner from writing.
Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import Connection, func, insert, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from omniserve.server.batches.database import OWNERS, Database, StorageError

# PostgreSQL ends a session that shows no sign of life for so long: the lock of a frozen owner, or of a lost machine.
_PG_GONE_AFTER_S = 20


class NotOwner(Exception):
    """The server does not own the batches of its model, or cannot prove that it does."""


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
        with self._database.told():
            for name, value in settings.items():
                connection.execute(query, {"name": name, "value": value})
        return connection

    def _is(self, query: str) -> bool:
        assert self._connection is not None
        with self._database.told():
            return bool(self._connection.execute(text(query), self._key).scalar_one())


Lock = FileLock | AdvisoryLock


class Owner:
    """The batches of one model in the hands of this server, until it loses them; ``fence`` is its fencing number."""

    def __init__(self, database: Database, lock: Lock, model: str, fence: int) -> None:
        self.database = database
        self.model = model
        self._lock = lock
        self._fence = fence

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that changes something, all of it or nothing. There is no new owner before it ends.

        Raises:
            NotOwner: There is a new owner.
            StorageError: The database is busy, full, gone or broken.
        """
        with self.database.write() as connection:
            self._check_fence(connection)
            yield connection

    def prove(self) -> None:
        """See that the server is still the owner. A lock that was lost is taken again if no other server had it since.

        Raises:
            NotOwner: It is not.
            StorageError: File or database do not work.
        """
        if not self._lock.is_held() and not self._lock.acquire():
            raise NotOwner(f"another process has the lock of the batches for {self.model!r}")
        with self.database.read() as connection:
            self._check_fence(connection)

    def _check_fence(self, connection: Connection) -> None:
        # The row stays as it is until the transaction ends.
        query = select(OWNERS.c.fence).where(OWNERS.c.model == self.model).with_for_update(read=True)
        if connection.execute(query).scalar() != self._fence:
            raise NotOwner(f"another server has taken over the batches for {self.model!r}")


def make_lock(database: Database, model: str) -> Lock:
    """Return the lock of the batches of a model, not acquired."""
    if database.file is None:
        return AdvisoryLock(database, f"omniserve batches of {model}")
    # By digest, as a model's name may be a path.
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return FileLock(database.file.with_name(f"{database.file.name}.{digest}.lock"))


def take(database: Database, lock: Lock, model: str) -> Owner | None:
    """Become the owner of the batches of a model; None if another process is.

    Raises:
        StorageError: The database does not work.
    """
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
            return Owner(database, lock, model, (fence or 0) + 1)
    except StorageError:
        lock.release()
        raise
