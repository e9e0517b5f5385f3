"""The load of a benchmark: random prompts, Poisson arrivals, and best-effort work that is always there."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from omniserve.bench.client import Call, Seen, follow, send

_WORDS = (
    "time person year way day thing man world life hand part child eye place work week case point company number"
).split()
_LOWEST_ID = 16
"""Tokens below are special ones in many vocabularies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What requests of one kind look like.

    Raises:
        ValueError: A number is out of its range.
    """

    endpoint: str
    model: str | None
    service_tier: str | None
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    """Lengths are drawn from ``1 - range_ratio`` to ``1 + range_ratio`` times these."""
    below_id: int = 400
    """Prompts of completions are random token ids below this one; those of chats are random words."""

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise ValueError("lengths must be at least 1 token")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--random-range-ratio must be in [0, 1), got {self.range_ratio}")
        if self.below_id <= _LOWEST_ID:
            raise ValueError(f"--random-vocab must be more than {_LOWEST_ID}, got {self.below_id}")


def calls(shape: Shape, rng: random.Random, *, rate: float = math.inf) -> Iterator[Call]:
    """Yield requests without end; they come ``rate`` a second on average, with exponential gaps, inf: all at once."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate) if math.isfinite(rate) else 0.0
        length, most = (_drawn(rng, n, shape.range_ratio) for n in (shape.input_len, shape.output_len))
        body = {
            "max_tokens": most, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        if shape.endpoint.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": " ".join(rng.choices(_WORDS, k=length))}]
        else:
            body["prompt"] = [rng.randrange(_LOWEST_ID, shape.below_id) for _ in range(length)]
        if shape.model is not None:
            body["model"] = shape.model
        if shape.service_tier is not None:
            body["service_tier"] = shape.service_tier
        yield Call(endpoint=shape.endpoint, body=body, send_at_s=at_s)


def _drawn(rng: random.Random, mean: int, ratio: float) -> int:
    return max(1, round(rng.uniform(mean * (1 - ratio), mean * (1 + ratio))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a load has brought."""

    requests: Sequence[Seen]
    """The timed requests, in the order of their arrival."""
    seconds: float
    """From the first to the end of the last."""
    background: Sequence[Seen] = ()
    """Requests of the work beside them, complete or not."""


async def run(
    client: httpx.AsyncClient,
    timed: Sequence[Call],
    *,
    background: Iterator[Call] | None = None,
    background_concurrency: int = 0,
    max_concurrency: int | None = None,
    on_done: Callable[[Seen], object] = lambda _: None,
) -> Outcome:
    """Send the timed requests at their times, whatever becomes of others, and wait for all of them.

    Args:
        background: Requests of which so many are always unfinished (``background_concurrency``); those that still run
            when the timed ones have ended are left.
        max_concurrency: Most timed requests that run at a time; others wait, and count from when they are sent. None:
            any number.
        on_done: Called with each timed request as it ends.
    """
    room = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    began_s = time.monotonic()
    beside: list[Seen] = []

    async def one(call: Call) -> Seen:
        await asyncio.sleep(max(0.0, began_s + call.send_at_s - time.monotonic()))
        if room is None:
            seen = await send(client, call)
        else:
            async with room:
                seen = await send(client, call)
        on_done(seen)
        return seen

    async def worker(source: Iterator[Call]) -> None:
        while True:
            seen = Seen(sent_s=time.monotonic())
            beside.append(seen)
            await follow(client, next(source), seen)
            if seen.error is not None:
                await asyncio.sleep(0.5)  # a server that refuses it is not to be flooded

    workers = [asyncio.create_task(worker(background)) for _ in range(background_concurrency) if background is not None]
    try:
        done = await asyncio.gather(*map(one, timed))
        seconds = time.monotonic() - began_s
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return Outcome(requests=done, seconds=seconds, background=beside)
