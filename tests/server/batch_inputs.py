"""Input files of batches for the fake engine, and what it answers."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import openai
from openai.types import Batch

FINAL = ("completed", "failed", "expired", "cancelled")
PATIENCE_S = 120


def prompt_of(batch: int, line: int) -> list[int]:
    """Return a prompt that no other line of any batch has; no token of it causes a fault."""
    return [100 + batch % 200, 100 + line // 200, 100 + line % 200]


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fake"} | body}


def completion_line(number: int, *, prompt: Sequence[int], max_tokens: int = 4) -> dict[str, Any]:
    return line(f"line-{number}", {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True})


def lines_of_batch(batch: int, count: int) -> list[dict[str, Any]]:
    """Return lines of random lengths, the same for the same batch, with prompts that no other batch has."""
    sizes = random.Random(batch)
    return [completion_line(n, prompt=prompt_of(batch, n), max_tokens=sizes.randint(10, 100)) for n in range(count)]


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(client: openai.OpenAI, lines: Iterable[dict[str, Any]] | bytes) -> str:
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    return client.files.create(file=("input.jsonl", io.BytesIO(content)), purpose="batch").id


def submit(
    client: openai.OpenAI, lines: Iterable[dict[str, Any]] | bytes, *, window: str = "24h", **more: Any
) -> Batch:
    more = {"endpoint": "/v1/completions"} | more
    return client.batches.create(input_file_id=upload(client, lines), completion_window=window, **more)  # type: ignore


def wait_for(client: openai.OpenAI, batch_id: str, statuses: Sequence[str] = FINAL) -> Batch:
    deadline = time.monotonic() + PATIENCE_S
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert batch.status not in FINAL, batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output or error file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
