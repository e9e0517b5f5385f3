"""Responses that outlive their calls: in the database of the batches, each for its API key, for some time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select, update

from omniserve.server.batches.database import RESPONSES, Database, Row
from omniserve.server.errors import ApiError

ID_PREFIX = "resp_"
_SWEEP_EVERY_S = 600.0
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""Begins of items' ids, by their types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewResponse:
    """A response that is to be kept."""

    id: str
    caller: str | None
    """The name of the API key that it belongs to; None: there are no keys."""
    input: str
    """JSON text of the items of its input, without those of responses before it."""
    response: Mapping[str, Any]
    """The answer."""


class ResponseStore:
    """Stored responses.

    For a caller there is only what belongs to its API key; for None, everything. All raise StorageError when the
    database does not work, and ApiError for what is not there, or not any more.

    Args:
        database: Open; it may be shared.
        ttl_s: Seconds that a response is kept.
    """

    def __init__(self, database: Database, *, ttl_s: float) -> None:
        self._database = database
        self._ttl_s = ttl_s
        self._swept_s = -_SWEEP_EVERY_S

    async def put(self, new: NewResponse, *, alive_s: float | None = None) -> None:
        """Keep a response.

        Args:
            new: The response.
            alive_s: Seconds for which it counts as running unless it is changed before; None: it is complete.
        """
        await asyncio.to_thread(self._put, new, alive_s)

    async def change(self, response_id: str, response: Mapping[str, Any] | None, *, alive_s: float | None) -> bool:
        """Replace the answer, or leave it as it is (None), of a response that still runs; see ``put``.

        Returns:
            False if it was deleted or cancelled meanwhile.
        """
        return await asyncio.to_thread(self._change, response_id, response, alive_s)

    async def get(self, response_id: str, caller: str | None, *, param: str | None = None) -> dict[str, Any]:
        """Return a response; ``param`` is the field of a request that names it."""
        row = await asyncio.to_thread(self._read, response_id, caller, param)
        return _response(row)

    async def input_items(self, response_id: str, caller: str | None) -> list[dict[str, Any]]:
        """Return the items of a response's input, in their order."""
        return _input(await asyncio.to_thread(self._read, response_id, caller, None))

    async def conversation(self, response_id: str, caller: str | None, *, most: int) -> list[dict[str, Any]]:
        """Return all items up to a response: those of the responses before it, its input and its output.

        Args:
            response_id: The last response.
            caller: Its API key.
            most: Most items.
        """
        return await asyncio.to_thread(self._conversation, response_id, caller, most)

    async def items(self, item_ids: Iterable[str], caller: str | None) -> dict[str, dict[str, Any]]:
        """Return items of stored responses, by their ids, which have those of the responses in them."""
        return await asyncio.to_thread(self._items, list(item_ids), caller)

    async def delete(self, response_id: str, caller: str | None) -> None:
        """Forget a response."""
        await asyncio.to_thread(self._delete, response_id, caller)

    def close(self) -> None:
        """Close the connections of the database."""
        self._database.close()

    def _put(self, new: NewResponse, alive_s: float | None) -> None:
        with self._database.write() as connection:
            now = self._database.now(connection)
            if time.monotonic() - self._swept_s > _SWEEP_EVERY_S:
                connection.execute(delete(RESPONSES).where(RESPONSES.c.expires_at <= now))
                self._swept_s = time.monotonic()
            connection.execute(
                insert(RESPONSES).values(
                    id=new.id,
                    created_at=now,
                    expires_at=now + self._ttl_s,
                    alive_until=None if alive_s is None else now + alive_s,
                    caller=new.caller,
                    input=new.input,
                    response=json.dumps(new.response),
                )
            )

    def _change(self, response_id: str, response: Mapping[str, Any] | None, alive_s: float | None) -> bool:
        with self._database.write() as connection:
            now = self._database.now(connection)
            values: dict[str, Any] = {} if response is None else {"response": json.dumps(response)}
            values["alive_until"] = None if alive_s is None else now + alive_s
            runs = and_(RESPONSES.c.id == response_id, RESPONSES.c.alive_until.is_not(None))
            return connection.execute(update(RESPONSES).where(runs).values(**values)).rowcount > 0

    def _read(self, response_id: str, caller: str | None, param: str | None) -> dict[str, Any]:
        with self._database.read() as connection:
            return self._row(connection, response_id, caller, param)

    def _row(self, connection: Connection, response_id: str, caller: str | None, param: str | None) -> dict[str, Any]:
        now = self._database.now(connection)
        row: Row | None = None
        if response_id.isascii() and response_id.isprintable():  # as ids are; not every database takes every other text
            query = select(RESPONSES).where(_is(response_id, caller), RESPONSES.c.expires_at > now)
            row = connection.execute(query).mappings().first()
        if row is None:
            code = "response_not_found" if param is None else f"{param.removesuffix('_id')}_not_found"
            raise ApiError(
                f"there is no response {response_id!r} here: it was not stored, or was deleted, or its time is over",
                status=404 if param is None else 400,
                param=param,
                code=code,
            )
        return {**row, "is_lost": row["alive_until"] is not None and row["alive_until"] <= now}

    def _conversation(self, response_id: str, caller: str | None, most: int) -> list[dict[str, Any]]:
        parts: list[list[dict[str, Any]]] = []
        num_items, before = 0, response_id
        with self._database.read() as connection:
            while before is not None:
                row = self._row(connection, before, caller, "previous_response_id")
                response = _response(row)
                if response["status"] in ("queued", "in_progress"):
                    raise ApiError(
                        f"the response {before!r} still runs; wait for its end",
                        param="previous_response_id",
                        code="invalid_value",
                    )
                parts.append(_input(row) + response["output"])
                num_items += len(parts[-1])
                if num_items > most:
                    raise ApiError(
                        f"the conversation has more than {most} items; begin a new one",
                        param="previous_response_id",
                        code="invalid_value",
                    )
                before = response["previous_response_id"]
        return [item for part in reversed(parts) for item in part]

    def _items(self, item_ids: list[str], caller: str | None) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        with self._database.read() as connection:
            for item_id in item_ids:
                parts = item_id.split("_")
                if item_id in found or len(parts) != 3:
                    continue
                row = connection.execute(
                    select(RESPONSES).where(
                        _is(ID_PREFIX + parts[1], caller), RESPONSES.c.expires_at > self._database.now(connection)
                    )
                ).mappings().first()  # fmt: skip
                if row is not None:
                    items = _input(row) + json.loads(row["response"])["output"]
                    found |= {item["id"]: item for item in items}
        if (missing := next((item_id for item_id in item_ids if item_id not in found), None)) is not None:
            raise ApiError(
                f"there is no item {missing!r} here: its response was not stored, or was deleted, or its time is over; "
                "send the item itself",
                param="input",
                code="item_not_found",
            )
        return found

    def _delete(self, response_id: str, caller: str | None) -> None:
        with self._database.write() as connection:
            self._row(connection, response_id, caller, None)
            connection.execute(delete(RESPONSES).where(_is(response_id, caller)))


def _is(response_id: str, caller: str | None) -> ColumnElement[bool]:
    own = RESPONSES.c.id == response_id
    return own if caller is None else and_(own, RESPONSES.c.caller == caller)


def _input(row: Row | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of an input; those that came without an id have one that names their response."""
    key = row["id"].removeprefix(ID_PREFIX)
    items = json.loads(row["input"])
    return [{"id": f"{_PREFIXES[item['type']]}_{key}_i{i}"} | item for i, item in enumerate(items)]


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = json.loads(row["response"])
    if row["is_lost"]:
        message = "the server that worked on this response has ended; send the request again"
        response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return response
