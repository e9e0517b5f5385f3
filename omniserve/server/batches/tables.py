"""The tables of the database. Times are seconds since 1970, JSON is text: the same on every database."""

from __future__ import annotations

from enum import IntEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    literal_column,
    text,
    update,
)

SCHEMA_VERSION = 3

# States of a batch in which it is still worked on; the others are final.
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class LineState(IntEnum):
    """The state of a line of a batch."""

    PENDING = 0
    """Without a result. Which of these lines run is known to the owner alone."""
    DONE = 2
    """The line has a result, or its batch ended before it was run."""


METADATA = MetaData()

VERSION = Table("omniserve_schema", METADATA, Column("version", Integer, primary_key=True))

OWNERS = Table(
    "omniserve_owners",
    METADATA,
    Column("model", Text, primary_key=True),
    Column("fence", BigInteger, nullable=False),  # counts the owners; the writes of all but the last one are refused
)

FILES = Table(
    "omniserve_files",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("caller", Text),  # the name of the API key that it belongs to
    Index("omniserve_files_by_age", "created_at", "id"),
)

LEFTOVERS = Table(  # files on the disk that clients do not see: not yet, or not any more
    "omniserve_leftovers",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("remove_after", Double, nullable=False, index=True),
)

BATCHES = Table(
    "omniserve_batches",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("outcome", String(16), nullable=False),  # the status that finalizing ends in, unless it is cancelled then
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("completion_window", String(32), nullable=False),
    Column("user_metadata", Text),
    Column("model", Text, nullable=False),
    Column("caller", Text),
    Column("may_escalate", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    Column("errors", Text),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("outputs_expire_after_s", Double),
    Column("total", Integer, nullable=False, default=0),
    Column("completed", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    Column("escalated", Integer, nullable=False, default=0),
    Column("input_tokens", BigInteger, nullable=False, default=0),
    Column("output_tokens", BigInteger, nullable=False, default=0),
    Column("problem", Text),  # why work on it is held up
    Index("omniserve_batches_by_age", "created_at", "id"),
    Index("omniserve_batches_by_status", "status", "expires_at"),
)

LINES = Table(
    "omniserve_lines",
    METADATA,
    Column("batch_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),  # of the line in the input file, from 1
    Column("custom_id", Text, nullable=False),
    # Its bytes in the input file are [start, start + length).
    Column("start", BigInteger, nullable=False),
    Column("length", Integer, nullable=False),
    Column("state", Integer, nullable=False, default=int(LineState.PENDING)),
    Column("engine_stops", Integer, nullable=False, default=0),
    Column("escalated", Boolean, nullable=False, default=False),
    Column("ok", Boolean),
    Column("result", Text),
    Index("omniserve_lines_by_state", "batch_id", "state", "number"),
)

SUSPECT_STOPS = 2
"""A line that ran so often when the engine ended may be the reason."""
IS_SUSPECT = LINES.c.engine_stops >= literal_column(str(SUSPECT_STOPS))
"""Whether a line may be what ends the engine; with the number in it, as an index of some rows asks for."""
MAKE_SUSPECT_INDEX = text(
    "create index if not exists omniserve_lines_suspect on omniserve_lines (batch_id, state, number) "
    f"where engine_stops >= {SUSPECT_STOPS}"
)
"""Finds the few suspects among many lines. To be made after the tables: of two indexes that are as good by its rules
SQLite takes the younger one. It came after the tables did, and a database without it is of the same version."""


def migrate(connection: Connection) -> None:
    """Bring a database of version 2, in which servers shared the lines of a batch by leases, to this version.

    A line that was claimed has no result yet: it is pending again. Servers of the old version which still run can no
    longer write to lines and batches: the columns that they write are gone.
    """
    connection.execute(update(LINES).where(LINES.c.state == 1).values(state=LineState.PENDING))
    for index in ("omniserve_lines_by_owner", "omniserve_lines_by_lease"):
        connection.execute(text(f"drop index if exists {index}"))
    for table in (BATCHES, LINES):
        for column in ("owner", "lease_until", "not_before"):
            connection.execute(text(f"alter table {table.name} drop column {column}"))
    connection.execute(update(VERSION).values(version=SCHEMA_VERSION))
