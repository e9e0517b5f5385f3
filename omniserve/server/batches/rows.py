"""Files and batches as rows, within a transaction: what ``store`` and ``progress`` both do with them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Table, and_, select, update

from omniserve.server.batches.tables import BATCHES, FILES, LINES, LineState
from omniserve.server.errors import ApiError

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
    ended = connection.execute(
        update(LINES).where(open_lines).values(state=LineState.DONE, ok=False, owner=None)
    ).rowcount
    return {"failed": batch["failed"] + ended}
