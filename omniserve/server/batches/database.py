"""The database: transactions, whose clock counts, and what its errors mean to a client."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, extract, func, insert, select, text

from omniserve.server.batches.tables import MAKE_SUSPECT_INDEX, METADATA, SCHEMA_VERSION, VERSION, migrate
from omniserve.server.errors import ApiError

# How long a transaction waits for another one before it gives up.
_BUSY_TIMEOUT_S = 10.0
# lock_not_available, deadlock_detected, serialization_failure
_PG_BUSY = ("55P03", "40P01", "40001")
# A server that is frozen must not hold up the others for longer.
_PG_IDLE_TIMEOUT_S = 20.0
_PG_CONNECT_TIMEOUT_S = 10
# Any number will do, if it is the same in all servers: the lock that one of them holds while it makes the tables.
_SCHEMA_LOCK = 0x6F6D6E69
_MIGRATED_VERSION = 2


class StorageError(ApiError):
    """Database or disk do not do what they should; nothing of the failed operation was kept."""


def storage_full(reason: object) -> StorageError:
    """Return the error of writes that found no room."""
    return StorageError(
        f"there is no room to store this ({reason}); free space there, then send it again",
        status=507,
        code="storage_full",
        retry_after_s=60,
    )


class Database:
    """A database that many processes may use at a time.

    Args:
        url: SQLAlchemy's.
        clock: Seconds since 1970; None takes the database server's clock, or this machine's for SQLite, so that all
            processes of a database go by one clock.

    Raises:
        StorageError: It cannot be opened, is none, or was made by another version.
    """

    def __init__(self, url: URL, clock: Callable[[], float] | None = None) -> None:
        self._shown = url.set(username=None, password=None).difference_update_query(["password"]).render_as_string()
        try:
            self._engine, is_sqlite = _engine(url)
        except (exc.SQLAlchemyError, ImportError, ValueError) as error:
            raise StorageError(f"--database-url {self._shown}: {error}", status=500) from None
        self.file = Path(url.database or "") if is_sqlite else None
        """The file of an SQLite database; None for PostgreSQL."""
        self._clock = clock if clock is not None or not is_sqlite else time.time
        self._reading = self._engine.execution_options(reading=True)
        with self.write() as connection:
            self._make_tables(connection)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that changes something: all of it is kept, or nothing.

        Raises:
            StorageError: The database is busy, full, gone or broken.
        """
        with self.told(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that changes nothing.

        Raises:
            StorageError: As for ``write``.
        """
        with self.told(), self._reading.begin() as connection:
            yield connection

    def now(self, connection: Connection) -> float:
        """Return the time, in seconds since 1970."""
        if self._clock is not None:
            return self._clock()
        return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def connect(self) -> Connection:
        """Return a connection of its own, without transactions, that is closed and not given to others after use."""
        with self.told():
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            connection.detach()
            return connection

    @contextmanager
    def told(self) -> Iterator[None]:
        """Let errors of the database be StorageErrors."""
        try:
            yield
        except exc.SQLAlchemyError as error:
            cause = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
            raise self._translated(cause) from error

    def _translated(self, cause: BaseException) -> StorageError:
        # SQLite's code in its lowest byte; the others have a code per detail.
        code = getattr(cause, "sqlite_errorcode", -1) & 0xFF
        reason = f"{self._shown}: {' '.join(str(cause).split())}"
        if code == sqlite3.SQLITE_FULL or getattr(cause, "sqlstate", None) == "53100":
            return storage_full(reason)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or getattr(cause, "sqlstate", None) in _PG_BUSY:
            return StorageError(
                f"the database is locked by another process ({reason}); try again",
                status=503,
                code="storage_busy",
                retry_after_s=1,
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return StorageError(
                f"the database is damaged ({reason}); stop all servers that use it and restore it from a copy, or move "
                "it away to begin with an empty one",
                status=500,
                code="storage_damaged",
            )
        return StorageError(
            f"the database failed ({reason}); see to it and try again", status=503, code="storage_error"
        )

    def _make_tables(self, connection: Connection) -> None:
        if self._engine.dialect.name == "postgresql":
            connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
        VERSION.create(connection, checkfirst=True)
        found = connection.execute(select(VERSION.c.version)).scalar()
        if found not in (None, _MIGRATED_VERSION, SCHEMA_VERSION):
            raise StorageError(
                f"{self._shown} was made by another version of OmniServe (schema {found}, this one has "
                f"{SCHEMA_VERSION}); use that version, or another --data-dir or --database-url",
                status=500,
            )
        METADATA.create_all(connection)
        if found is None:
            connection.execute(insert(VERSION).values(version=SCHEMA_VERSION))
        elif found == _MIGRATED_VERSION:
            migrate(connection)
        connection.execute(MAKE_SUSPECT_INDEX)


def _engine(url: URL) -> tuple[Engine, bool]:
    """Return the engine of a URL, and whether it is SQLite.

    Raises:
        ValueError: It is of a database that is not supported.
    """
    if url.get_backend_name() == "postgresql":
        gone = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
        engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            isolation_level="READ COMMITTED",
            connect_args={"connect_timeout": _PG_CONNECT_TIMEOUT_S, **gone},
        )
        _set_up_postgres(engine)
        return engine, False
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        engine = create_engine(url)
        _set_up_sqlite(engine)
        return engine, True
    raise ValueError("it must be postgresql://USER@HOST/NAME or sqlite:////PATH")


def _set_up_postgres(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
            cursor.execute(f"SET idle_in_transaction_session_timeout = {int(_PG_IDLE_TIMEOUT_S * 1000)}")
        connection.commit()


def _set_up_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions begin where begin, below, says so
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut, too
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that first reads and then writes must not find that another process wrote in between.
        reading = connection.get_execution_options().get("reading")
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
