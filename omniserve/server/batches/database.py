"""The database: its tables, its transactions and its clock, and what its errors mean to a client.

Times are seconds since 1970, JSON is text: the same on every database.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from omniserve.server.errors import ApiError

# How long a transaction waits for another one before it gives up.
_BUSY_TIMEOUT_S = 10.0
_PG_LOCK_NOT_AVAILABLE = "55P03"
# lock_not_available, deadlock_detected, serialization_failure
_PG_BUSY = (_PG_LOCK_NOT_AVAILABLE, "40P01", "40001")
# A server that is frozen must not hold up the others for longer.
_PG_IDLE_TIMEOUT_S = 20.0
_PG_NAME = "omniserve"
# PostgreSQL has no timeout for a transaction whose client was frozen while it sent a statement or took its result: to
# the database the statement goes on. With a server that is well none takes so long.
_PG_END_FROZEN = sa.text(
    "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
    "and application_name = :name and state = 'active' and wait_event in ('ClientRead', 'ClientWrite') "
    "and xact_start is not null and state_change < clock_timestamp() - make_interval(secs => :seconds)"
)
_PG_CONNECT_TIMEOUT_S = 10
# Any number will do, if it is the same in all servers: the lock that one of them holds while it makes the tables.
_SCHEMA_LOCK = 0x6F6D6E69
_MIGRATED_VERSIONS = (2, 3)


SCHEMA_VERSION = 4

TIMED_STATUSES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""States of a batch of which the table has the time at which they began."""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that has not ended; the others are final."""


class LineState(IntEnum):
    """The state of a line of a batch."""

    PENDING = 0
    """The line has no result. Which of the pending lines run is known to the owner alone."""
    DONE = 2
    """The line has a result, or its batch ended before it was run."""


Row = sa.RowMapping
"""A row of a table, by column name."""

METADATA = sa.MetaData()

VERSION = sa.Table("omniserve_schema", METADATA, sa.Column("version", sa.Integer, primary_key=True))

OWNERS = sa.Table(
    "omniserve_owners",
    METADATA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),  # counts the owners: only the last one may write
)

FILES = sa.Table(
    "omniserve_files",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("caller", sa.Text),  # the name of the API key that it belongs to
    sa.Index("omniserve_files_by_age", "created_at", "id"),
)

LEFTOVERS = sa.Table(  # files on the disk that clients do not see: not yet, or not any more
    "omniserve_leftovers",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("remove_after", sa.Double, nullable=False, index=True),
)

BATCHES = sa.Table(
    "omniserve_batches",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),  # the status after finalizing, unless it is cancelled
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(32), nullable=False),
    sa.Column("user_metadata", sa.Text),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("caller", sa.Text),
    sa.Column("may_escalate", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    *(sa.Column(f"{status}_at", sa.Double) for status in TIMED_STATUSES),
    sa.Column("errors", sa.Text),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("outputs_expire_after_s", sa.Double),
    sa.Column("total", sa.Integer, nullable=False, default=0),
    sa.Column("completed", sa.Integer, nullable=False, default=0),
    sa.Column("failed", sa.Integer, nullable=False, default=0),
    sa.Column("escalated", sa.Integer, nullable=False, default=0),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("problem", sa.Text),  # why work on it is held up
    sa.Index("omniserve_batches_by_age", "created_at", "id"),
    sa.Index("omniserve_batches_by_status", "status", "expires_at"),
)

LINES = sa.Table(
    "omniserve_lines",
    METADATA,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),  # of the line in the input file, from 1
    sa.Column("custom_id", sa.Text, nullable=False),
    # Its bytes in the input file are [start, start + length).
    sa.Column("start", sa.BigInteger, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("state", sa.Integer, nullable=False, default=int(LineState.PENDING)),
    sa.Column("engine_stops", sa.Integer, nullable=False, default=0),
    sa.Column("escalated", sa.Boolean, nullable=False, default=False),
    sa.Column("ok", sa.Boolean),
    sa.Column("result", sa.Text),
    sa.Index("omniserve_lines_by_state", "batch_id", "state", "number"),
)

RESPONSES = sa.Table(  # it came after the others did, and a database without it is of the same version
    "omniserve_responses",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False, index=True),
    sa.Column("alive_until", sa.Double),  # of one that runs: when its server counts as dead; else null
    sa.Column("caller", sa.Text),
    sa.Column("input", sa.Text, nullable=False),
    sa.Column("response", sa.Text, nullable=False),
)

SUSPECT_STOPS = 2
"""The number of ends of the engine while a line ran from which on the line may be their cause."""
IS_SUSPECT = LINES.c.engine_stops >= sa.literal_column(str(SUSPECT_STOPS))
"""Condition on a line that may be what ends the engine. The number is written into the SQL text, as a partial index
needs it."""
MAKE_SUSPECT_INDEX = sa.text(
    "create index if not exists omniserve_lines_suspect on omniserve_lines (batch_id, state, number) "
    f"where engine_stops >= {SUSPECT_STOPS}"
)
"""Finds the few suspects among many lines. To be made after the tables: of two indexes that are as good by its rules
SQLite takes the younger one. It came after the tables did, and a database without it is of the same version."""


class StorageError(ApiError):
    """Database or disk have failed; nothing of the failed operation was kept."""


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

    Its functions raise StorageError when it is busy, full, gone or broken.

    Args:
        url: SQLAlchemy's.
        clock: Seconds since 1970; None takes the database server's clock, or this machine's for SQLite, so that all
            processes of a database go by one clock.

    Raises:
        StorageError: It cannot be opened, is none, or was made by another version.
    """

    def __init__(self, url: sa.URL, clock: Callable[[], float] | None = None) -> None:
        self._shown = url.set(username=None, password=None).difference_update_query(["password"]).render_as_string()
        try:
            self._engine = _engine(url)
        except (exc.SQLAlchemyError, ImportError, ValueError) as error:
            raise StorageError(f"--database-url {self._shown}: {error}", status=500) from None
        is_sqlite = self._engine.dialect.name == "sqlite"
        self.file = Path(url.database or "") if is_sqlite else None
        """The file of an SQLite database; None for PostgreSQL."""
        self._clock = clock or (time.time if is_sqlite else None)
        self._reading = self._engine.execution_options(reading=True)
        with self.write() as connection:
            self._make_tables(connection)

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Open a transaction that changes something: all of it is kept, or nothing."""
        with self.storage_errors():
            try:
                with self._engine.begin() as connection:
                    yield connection
            except exc.DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) == _PG_LOCK_NOT_AVAILABLE:
                    self._end_frozen()
                raise

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a transaction that changes nothing."""
        with self.storage_errors(), self._reading.begin() as connection:
            yield connection

    def now(self, connection: sa.Connection) -> float:
        """Return the time, in seconds since 1970."""
        if self._clock is not None:
            return self._clock()
        return float(connection.execute(sa.select(sa.extract("epoch", sa.func.clock_timestamp()))).scalar_one())

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def connect(self) -> sa.Connection:
        """Return a connection outside of the pool, without transactions."""
        with self.storage_errors():
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            connection.detach()
            return connection

    @contextmanager
    def storage_errors(self) -> Iterator[None]:
        """Raise StorageError for errors of the database."""
        try:
            yield
        except exc.SQLAlchemyError as error:
            cause = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
            raise _translated(cause, f"{self._shown}: {' '.join(str(cause).split())}") from error

    def _end_frozen(self) -> None:
        """End the transactions, and so free the locks, of servers that were frozen in the middle of a statement."""
        with self._engine.begin() as connection:
            connection.execute(_PG_END_FROZEN, {"name": _PG_NAME, "seconds": _PG_IDLE_TIMEOUT_S})

    def _make_tables(self, connection: sa.Connection) -> None:
        if self.file is None:
            connection.execute(sa.text("select pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
        VERSION.create(connection, checkfirst=True)
        found = connection.execute(sa.select(VERSION.c.version)).scalar()
        if found not in (None, *_MIGRATED_VERSIONS, SCHEMA_VERSION):
            raise StorageError(
                f"{self._shown} was made by another version of OmniServe (schema {found}, this one has "
                f"{SCHEMA_VERSION}); use that version, or another --data-dir or --database-url",
                status=500,
            )
        METADATA.create_all(connection)
        if found is None:
            connection.execute(sa.insert(VERSION).values(version=SCHEMA_VERSION))
        elif found in _MIGRATED_VERSIONS:
            _migrate(connection, found)
        connection.execute(MAKE_SUSPECT_INDEX)


def _translated(cause: BaseException, reason: str) -> StorageError:
    # SQLite's code in its lowest byte; the others have a code per detail.
    code, sqlstate = getattr(cause, "sqlite_errorcode", -1) & 0xFF, getattr(cause, "sqlstate", None)
    if code == sqlite3.SQLITE_FULL or sqlstate == "53100":
        return storage_full(reason)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or sqlstate in _PG_BUSY:
        message = f"the database is locked by another process ({reason}); try again"
        return StorageError(message, status=503, code="storage_busy", retry_after_s=1)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StorageError(
            f"the database is damaged ({reason}); stop all servers that use it and restore it from a copy, or move "
            "it away to begin with an empty one",
            status=500,
            code="storage_damaged",
        )
    message = f"the database failed ({reason}); see to it and try again"
    return StorageError(message, status=503, code="storage_error")


def _engine(url: sa.URL) -> sa.Engine:
    """Return the engine of a URL.

    Raises:
        ValueError: It is of a database that is not supported.
    """
    if url.get_backend_name() == "postgresql":
        gone = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
        engine = sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            isolation_level="READ COMMITTED",
            connect_args={"connect_timeout": _PG_CONNECT_TIMEOUT_S, "application_name": _PG_NAME, **gone},
        )
        event.listen(engine, "connect", _set_up_postgres)
        return engine
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        engine = sa.create_engine(url)
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    raise ValueError("it must be postgresql://USER@HOST/NAME or sqlite:////PATH")


def _set_up_postgres(connection: Any, _: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
        cursor.execute(f"SET idle_in_transaction_session_timeout = {int(_PG_IDLE_TIMEOUT_S * 1000)}")
    connection.commit()


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin in _begin_sqlite
    connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut, too


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Keep a write-ahead log. A new database changes to it once, for which SQLite does not wait by its busy timeout."""
    until_s = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
        time.sleep(0.01)


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that first reads and then writes must not find that another process wrote in between.
    reading = connection.get_execution_options().get("reading")
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _migrate(connection: sa.Connection, found: int) -> None:
    """Bring a database of an older version to this one. Version 3 does not count cached tokens."""
    if found == 2:
        _drop_leases(connection)
    connection.execute(sa.text(f"alter table {BATCHES.name} add column cached_tokens bigint not null default 0"))
    connection.execute(sa.update(VERSION).values(version=SCHEMA_VERSION))


def _drop_leases(connection: sa.Connection) -> None:
    """Bring a database of version 2, in which servers shared the lines of a batch by leases, to version 3.

    A line that was claimed has no result yet: it is pending again. Servers of the old version which still run can no
    longer write to lines and batches: the columns that they write are gone.
    """
    connection.execute(sa.update(LINES).where(LINES.c.state == 1).values(state=LineState.PENDING))
    for index in ("omniserve_lines_by_owner", "omniserve_lines_by_lease"):
        connection.execute(sa.text(f"drop index if exists {index}"))
    for table in (BATCHES, LINES):
        for column in ("owner", "lease_until", "not_before"):
            connection.execute(sa.text(f"alter table {table.name} drop column {column}"))
