"""Many requests at a time, each on a connection of its own; what became of each is counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.server.attack.sockets import head


@dataclass(slots=True)
class Fate:
    """The outcome of one request."""

    outcome: str
    """The status; ``cut`` if an answer had no end, ``lost`` if there was none."""
    retry_after: bool = False
    ttft_s: float | None = None
    """Seconds from sending the request to the first byte of a streamed answer's body."""
    tpot_s: float | None = None
    num_tokens: int = 0


@dataclass(slots=True)
class Tally:
    """The outcomes of many requests."""

    fates: list[Fate] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(fate.outcome for fate in self.fates)

    def check(self, num_sent: int) -> None:
        """Fail unless each request was answered, or refused with a Retry-After."""
        assert len(self.fates) == num_sent
        assert set(self.outcomes) <= {"200", "429", "503"}, self.outcomes
        refused = [fate for fate in self.fates if fate.outcome != "200"]
        assert all(fate.retry_after for fate in refused), "somebody was not told when to come again"


async def send_one(url: str, fields: dict[str, Any], *, path: str = "/v1/completions") -> Fate:
    """Send a request, wait for the end of its answer."""
    parts, body = urlsplit(url), json.dumps(fields).encode()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        sent_s = time.monotonic()
        writer.write(head(body, path).replace(b"Host", b"Connection: close\r\nHost") + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        fate = Fate(answer[9:12].decode(), retry_after=b"retry-after:" in answer.lower())
        text = b""
        first_s = last_s = None
        while part := await reader.read(1 << 16):
            text = text[-64:] + part if fields.get("stream") else text + part
            fate.num_tokens += part.count(b'"text":')
            last_s = time.monotonic()
            first_s = first_s or last_s
        if fate.outcome == "200":
            whole = b"data: [DONE]" in text if fields.get("stream") else text.endswith(b"}")
            if not whole or b'"error":' in text:
                fate.outcome = "cut"
            if first_s is not None and last_s is not None:
                fate.ttft_s = first_s - sent_s
                fate.tpot_s = (last_s - first_s) / max(1, fate.num_tokens - 1)
        return fate
    except (OSError, asyncio.IncompleteReadError):
        return Fate("lost")
    finally:
        if writer is not None:
            writer.close()


async def send_all(url: str, requests: Iterable[dict[str, Any]]) -> Tally:
    """Send requests all at once."""
    return Tally(list(await asyncio.gather(*(send_one(url, fields) for fields in requests))))


async def send_at_rate(url: str, fields: Iterable[dict[str, Any]], *, per_s: float, seconds: float) -> Tally:
    """Send requests at a rate, however fast they are answered, then wait for the last answer."""
    begin_s, sent, source = time.monotonic(), list[asyncio.Task[Fate]](), iter(fields)
    while (now_s := time.monotonic() - begin_s) < seconds:
        for _ in range(len(sent), int(now_s * per_s) + 1):
            sent.append(asyncio.create_task(send_one(url, next(source))))
        await asyncio.sleep(0.5 / per_s)
    return Tally(list(await asyncio.gather(*sent)))
