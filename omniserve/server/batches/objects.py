"""OpenAI's objects of files and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from omniserve.server.batches.store import Page, Row

_TIMES = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file_object(row: Row) -> dict[str, Any]:
    """Return a file as clients see it."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["num_bytes"],
        "created_at": int(row["created_at"]),
        "expires_at": _seconds(row["expires_at"]),
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
    }


def batch_object(row: Row) -> dict[str, Any]:
    """Return a batch as clients see it; what OpenAI has no word for is under ``omniserve``."""
    num_input, num_output = row["input_tokens"], row["output_tokens"]
    faults = None if row["errors"] is None else {"object": "list", "data": json.loads(row["errors"])}
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "model": row["model"],
        "errors": faults,
        "input_file_id": row["input_file_id"],
        "completion_window": row["completion_window"],
        "status": row["status"],
        "output_file_id": row["output_file_id"],
        "error_file_id": row["error_file_id"],
        "created_at": int(row["created_at"]),
        **{f"{name}_at": _seconds(row[f"{name}_at"]) for name in _TIMES},
        "request_counts": {"total": row["total"], "completed": row["completed"], "failed": row["failed"]},
        "usage": {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        },
        "metadata": None if row["user_metadata"] is None else json.loads(row["user_metadata"]),
        "omniserve": {"escalated": row["escalated"], "problem": row["problem"]},
    }


def page_object(page: Page, shape: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    """Return one page of a list."""
    data = [shape(row) for row in page.rows]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": page.has_more, **ends}


def _seconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
