"""How a batch goes its way, by the hands of servers: validated, run, finalized; or failed, or expired.

Any number of servers may share the database. Whole batches, to be validated or finalized, belong to one owner until its
lease ends; lines do so by themselves (see ``claims``). Every function is one transaction, and blocks: call it in a
thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, and_, delete, exists, func, insert, or_, select, update

from omniserve.server.batches.database import Database
from omniserve.server.batches.leftovers import NewFile, make_known
from omniserve.server.batches.lines import CheckedLine, LineFault
from omniserve.server.batches.rows import Row, end_lines, get_row, set_batch
from omniserve.server.batches.tables import BATCHES, IS_SUSPECT, LINES, LineState

_ROWS_PER_INSERT = 1000


class Progress:
    """The batches that servers work on; all functions raise StorageError when the database does not work."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim_batch(self, owner: str, model: str, lease_s: float) -> Row | None:
        """Take the batch that has waited longest to be validated, for this model, or finalized; None without one."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            # The owner itself works on one at a time: what it still has was given back, but that failed.
            free = or_(BATCHES.c.owner.is_(None), BATCHES.c.owner == owner, BATCHES.c.lease_until < now)
            own = and_(BATCHES.c.status == "validating", BATCHES.c.model == model)
            query = (
                select(BATCHES)
                .where(or_(BATCHES.c.status.in_(("finalizing", "cancelling")), own))
                .where(free, BATCHES.c.not_before <= now)
                .order_by(BATCHES.c.created_at)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            batch = connection.execute(query).mappings().first()
            if batch is not None:
                set_batch(connection, batch["id"], {"owner": owner, "lease_until": now + lease_s})
            return batch

    def accept_lines(self, batch_id: str, owner: str, lines: Sequence[CheckedLine]) -> bool:
        """Enter the lines of a batch that was found right; False if it is no longer the owner's to validate."""
        with self._database.write() as connection:
            if not _is_owned(connection, batch_id, owner, ("validating",)):
                return False
            for i in range(0, len(lines), _ROWS_PER_INSERT):
                rows = [
                    {
                        "batch_id": batch_id,
                        "number": line.number,
                        "custom_id": line.custom_id,
                        "start": line.start,
                        "length": line.length,
                    }
                    for line in lines[i : i + _ROWS_PER_INSERT]
                ]
                # With RETURNING it is one statement. Many small ones psycopg would send in a pipeline, whose end
                # PostgreSQL awaits for ever if this process is frozen.
                connection.execute(insert(LINES).returning(LINES.c.number), rows)
            values = {"status": "in_progress", "total": len(lines), "owner": None, "problem": None}
            set_batch(connection, batch_id, values | {"in_progress_at": self._database.now(connection)})
            return True

    def fail_batch(self, batch_id: str, owner: str, faults: Sequence[LineFault]) -> bool:
        """End a batch whose input is wrong; False if it is no longer the owner's to validate."""
        with self._database.write() as connection:
            if not _is_owned(connection, batch_id, owner, ("validating",)):
                return False
            values = {"status": "failed", "errors": json.dumps([fault.as_dict() for fault in faults]), "owner": None}
            set_batch(connection, batch_id, values | {"failed_at": self._database.now(connection), "problem": None})
            return True

    def finish_batch(self, batch_id: str, owner: str, output: NewFile | None, errors: NewFile | None) -> bool:
        """End a batch whose result files lie on the disk, and forget its lines; False if it is not the owner's."""
        with self._database.write() as connection:
            if not _is_owned(connection, batch_id, owner, ("finalizing", "cancelling")):
                return False
            batch, now = get_row(connection, BATCHES, batch_id), self._database.now(connection)
            status = "cancelled" if batch["status"] == "cancelling" else batch["outcome"]
            values: dict[str, Any] = {"status": status, f"{status}_at": now, "owner": None, "problem": None}
            for column, file in (("output_file_id", output), ("error_file_id", errors)):
                if file is not None:
                    make_known(connection, file, now)
                    values[column] = file.id
            set_batch(connection, batch_id, values)
            connection.execute(delete(LINES).where(LINES.c.batch_id == batch_id))
            return True

    def postpone_batch(self, batch_id: str, owner: str, problem: str, delay_s: float) -> None:
        """Give a batch back that could not be worked on, and say why."""
        with self._database.write() as connection:
            not_before = self._database.now(connection) + delay_s
            values = {"owner": None, "problem": problem, "not_before": not_before}
            mine = and_(BATCHES.c.id == batch_id, BATCHES.c.owner == owner)
            connection.execute(update(BATCHES).where(mine).values(values))

    def expire_batches(self) -> list[str]:
        """End the batches whose window is over; return their ids."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            late = select(BATCHES).where(
                BATCHES.c.status.in_(("validating", "in_progress")), BATCHES.c.expires_at <= now
            )
            batches = connection.execute(late.order_by(BATCHES.c.id).with_for_update()).mappings().all()
            for batch in batches:
                values = {"status": "finalizing", "outcome": "expired", "finalizing_at": now, "not_before": 0.0}
                set_batch(connection, batch["id"], values | end_lines(connection, batch))
            return [batch["id"] for batch in batches]

    def results(self, batch_id: str, after: int, limit: int) -> Sequence[Row]:
        """Return the lines of a batch behind the one numbered ``after``, in order."""
        with self._database.read() as connection:
            query = select(*LINES.c["number", "custom_id", "ok", "result"])
            query = query.where(LINES.c.batch_id == batch_id, LINES.c.number > after)
            return connection.execute(query.order_by(LINES.c.number).limit(limit)).mappings().all()

    def running_batches(self, model: str) -> tuple[float, Sequence[Row]]:
        """Return the time and the batches of a model that are in progress, in the order in which lines are claimed.

        Beside its columns each has ``num_running``, lines that somebody runs, and ``is_claimable``: whether a line
        could be claimed now (one that may be what ends the engine does not count: it may have to wait for another).
        """
        with self._database.read() as connection:
            now = self._database.now(connection)
            its_own = LINES.c.batch_id == BATCHES.c.id
            running = select(func.count()).where(its_own, LINES.c.state == LineState.RUNNING)
            pending = exists().where(its_own, LINES.c.state == LineState.PENDING, LINES.c.not_before <= now)
            query = (
                select(
                    BATCHES,
                    running.scalar_subquery().label("num_running"),
                    pending.where(~IS_SUSPECT).label("is_claimable"),
                )
                .where(BATCHES.c.status == "in_progress", BATCHES.c.model == model)
                .order_by(BATCHES.c.expires_at, BATCHES.c.id)
            )
            return now, connection.execute(query).mappings().all()


def _is_owned(connection: Connection, batch_id: str, owner: str, statuses: tuple[str, ...]) -> bool:
    query = select(BATCHES.c.id).where(BATCHES.c.id == batch_id, BATCHES.c.owner == owner)
    return connection.execute(query.where(BATCHES.c.status.in_(statuses)).with_for_update()).first() is not None
