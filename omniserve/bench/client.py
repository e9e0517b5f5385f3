"""One request as its client sees it: it is streamed, and the times of its tokens are noted."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request to be sent."""

    endpoint: str
    """Path of the API, ``/v1/completions`` or ``/v1/chat/completions``."""
    body: dict[str, Any]
    send_at_s: float = 0.0
    """When it is sent, in seconds after the start of the load."""


@dataclass(kw_only=True, slots=True)
class Seen:
    """What became of a request; times are seconds on the client's monotonic clock. Filled while it runs."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    """Times of the events that brought text."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Token counts by the server's usage; those of the output as of the last event."""
    ended_s: float | None = None
    """When its stream was complete; None: it was not."""
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """The whole answer has come, with a first token."""
        return self.ended_s is not None and self.error is None and bool(self.token_times_s)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token of a complete request."""
        return self.token_times_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """Seconds from sending to the last token."""
        return self.token_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None without two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between two events with text."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


async def send(client: httpx.AsyncClient, call: Call) -> Seen:
    """Send a request and follow its stream to the end; a failure is in ``Seen.error``, not raised."""
    seen = Seen(sent_s=time.monotonic())
    await follow(client, call, seen)
    return seen


async def follow(client: httpx.AsyncClient, call: Call, seen: Seen) -> None:
    """As ``send``, into a record that can be read meanwhile."""
    try:
        async with client.stream("POST", call.endpoint, json=call.body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                seen.error = f"HTTP {response.status_code}: {text[:300]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    _note_event(seen, line.removeprefix("data:").strip())
        if seen.ended_s is None and seen.error is None:
            seen.error = "the stream ended early"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        seen.error = f"{type(error).__name__}: {error}"


def _note_event(seen: Seen, data: str) -> None:
    now_s = time.monotonic()
    if data == "[DONE]":
        seen.ended_s = now_s
        return
    event = json.loads(data)
    if "error" in event:
        seen.error = json.dumps(event["error"])[:300]
        return
    if usage := event.get("usage"):
        seen.num_prompt_tokens = usage["prompt_tokens"]
        seen.num_output_tokens = usage["completion_tokens"]
        seen.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if any(_has_text(choice) for choice in event.get("choices", ())):
        seen.token_times_s.append(now_s)


def _has_text(choice: dict[str, Any]) -> bool:
    """Tell whether a chunk brings tokens: text, reasoning or a call, and not only a role or the end."""
    if "delta" not in choice:
        return True
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
