"""Requests for random tokens, and an open-loop client: they leave at their own times, whatever became of others."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pydoc_data import topics
from typing import Any

import httpx

from benchmarks.common.record import ROOT
from benchmarks.common.server import SETTLED, Server, ServerFailed, ServerProcess
from omniserve.simulate.load import TraceRequest, fixed_lengths, poisson
from omniserve.simulate.load import requests as requests_of

LS_TIER, BE_TIER = "priority", "flex"
"""OpenAI's names of the two kinds of service class."""
TEXT = "\n".join(topics.topics.values())
"""Python's own help: English that every machine has."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A completion to ask for."""

    send_at_s: float
    """Seconds after the start of the load."""
    prompt: str | list[int]
    """Text or token ids."""
    max_tokens: int
    service_tier: str
    """LS_TIER or BE_TIER."""
    slo: tuple[float, float] | None = None
    """TTFT and TPOT objectives in seconds, sent along; None: the server's defaults."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The fields that a server is sent beside those that all servers know (``ignore_eos`` is one of these)."""

    omniserve_fields: bool = True
    """``service_tier`` and ``slo``; without them only this client tells LS from BE."""
    priority_field: bool = False
    """vLLM's ``priority``, which serves low numbers first under ``--scheduling-policy priority``: 0 is LS, 1 is BE."""
    model: str | None = None
    """The model's name, for servers that insist on one."""


OMNISERVE_WIRE = Wire()


@dataclass(kw_only=True)
class RequestRecord:
    """A request as the client saw it; times are seconds after the start of the load. Filled while the request runs."""

    service_tier: str
    send_at_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    """Times of the streamed chunks that carry a choice."""
    num_prompt_tokens: int = 0
    """The ids that were sent; for a text, as the server's usage says and 0 until the request has finished."""
    num_output_tokens: int = 0
    """The count of the server's usage; 0 until the request has finished."""
    finished: bool = False
    error: str | None = None
    rejected: bool = False
    """The server answered 429."""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a request without two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


def body_of(request: LoadRequest, wire: Wire) -> dict[str, Any]:
    """Return the JSON body that asks for ``request``: greedy, of exactly its length, streamed, with usage."""
    body: dict[str, Any] = {
        "prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if wire.omniserve_fields:
        body["service_tier"] = request.service_tier
        if request.slo is not None:
            body["slo"] = {"ttft_s": request.slo[0], "tpot_s": request.slo[1]}
    if wire.priority_field:
        body["priority"] = 0 if request.service_tier == LS_TIER else 1
    if wire.model is not None:
        body["model"] = wire.model
    return body


async def _send(
    client: httpx.AsyncClient, request: LoadRequest, record: RequestRecord, began_s: float, wire: Wire
) -> None:
    await asyncio.sleep(max(0.0, began_s + request.send_at_s - time.perf_counter()))
    record.sent_s = time.perf_counter() - began_s
    try:
        async with client.stream("POST", "/v1/completions", json=body_of(request, wire)) as response:
            if response.status_code != 200:
                record.rejected = response.status_code == 429
                record.error = f"HTTP {response.status_code}: {(await response.aread()).decode()[:500]}"
                return
            async for line in response.aiter_lines():
                _read_event(line, record, time.perf_counter() - began_s)
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"


def _read_event(line: str, record: RequestRecord, now_s: float) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        record.finished = record.error is None
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        record.error = json.dumps(event["error"])
        return
    if usage := event.get("usage"):
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]
    if event.get("choices"):
        if record.first_token_s is None:
            record.first_token_s = now_s
        record.last_token_s = now_s
        record.token_times_s.append(round(now_s, 6))


def drive(
    server: Server,
    requests: Sequence[LoadRequest],
    *,
    cutoff_s: float,
    may_be_cut_off: bool = False,
    must_finish: Callable[[LoadRequest], bool] = lambda _: True,
    wire: Wire = OMNISERVE_WIRE,
) -> tuple[list[RequestRecord], float]:
    """Send ``requests`` through ``/v1/completions`` and stream the answers.

    Ends when every request that ``must_finish`` selects has ended, or at ``cutoff_s``; what still runs then is
    disconnected, which the server takes as an abort.

    Returns:
        One record per request, in their order, and the seconds after which the load ended.

    Raises:
        ServerFailed: The server ended; or a request ended with another error than a rejection; or, unless it may, was
            cut off.
    """
    records = [
        RequestRecord(
            service_tier=request.service_tier, send_at_s=request.send_at_s,
            num_prompt_tokens=0 if isinstance(request.prompt, str) else len(request.prompt),
        )
        for request in requests
    ]  # fmt: skip

    def check() -> None:
        server.check_alive()
        if error := next((record.error for record in records if record.error and not record.rejected), None):
            raise ServerFailed(f"a request failed: {error}\n{server.log_tail()}")

    async def send_all() -> float:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=None, limits=limits) as client:
            began_s = time.perf_counter()
            pairs = list(zip(requests, records, strict=True))
            tasks = [asyncio.create_task(_send(client, *pair, began_s, wire)) for pair in pairs]
            awaited = {task for task, (request, _) in zip(tasks, pairs, strict=True) if must_finish(request)}
            try:
                while awaited and (left_s := began_s + cutoff_s - time.perf_counter()) > 0:
                    check()
                    _, awaited = await asyncio.wait(awaited, timeout=min(0.1, left_s))
            finally:
                end_s = time.perf_counter() - began_s
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return end_s

    end_s = asyncio.run(send_all())
    check()
    cut_off = [not record.finished and not record.rejected for record in records]
    if not may_be_cut_off and any(cut and must_finish(one) for cut, one in zip(cut_off, requests, strict=True)):
        raise ServerFailed(f"a request did not finish in {cutoff_s:g} s\n{server.log_tail()}")
    return records, end_s


def text_request(rng: random.Random, at_s: float, chars: int, max_tokens: int, tier: str) -> LoadRequest:
    """Return a request for a random piece of TEXT."""
    start = rng.randrange(len(TEXT) - chars)
    return LoadRequest(send_at_s=at_s, prompt=TEXT[start : start + chars], max_tokens=max_tokens, service_tier=tier)


def random_tokens(
    rows: Sequence[TraceRequest], rng: random.Random, *, tier: str, vocab_size: int,
    slo: tuple[float, float] | None = None,
) -> list[LoadRequest]:  # fmt: skip
    """Return requests of these times and lengths for random tokens from ``[1, vocab_size)``."""
    return [
        LoadRequest(
            send_at_s=row.arrival_s, prompt=[rng.randrange(1, vocab_size) for _ in range(row.input_tokens)],
            max_tokens=row.output_tokens, service_tier=tier, slo=slo,
        )
        for row in rows
    ]  # fmt: skip


def poisson_stream(
    rng: random.Random, *, rate: float, seconds: float, prompt: int, output: int, tier: str, vocab_size: int,
    slo: tuple[float, float] | None = None,
) -> list[LoadRequest]:  # fmt: skip
    """Return a Poisson stream of requests of one size."""
    rows = requests_of(poisson(rate, seconds, rng), fixed_lengths(prompt, output), rng)
    return random_tokens(rows, rng, tier=tier, vocab_size=vocab_size, slo=slo)


def backlog(rng: random.Random, *, count: int, prompt: int, output: int, vocab_size: int) -> list[LoadRequest]:
    """Return BE requests of one size that are all there from the start."""
    rows = requests_of([0.0] * count, fixed_lengths(prompt, output), rng)
    return random_tokens(rows, rng, tier=BE_TIER, vocab_size=vocab_size)


def few_of_each(
    ls: tuple[int, int], be: tuple[int, int], *, vocab_size: int, slo: tuple[float, float] = (600.0, 600.0)
) -> list[LoadRequest]:
    """Return four requests of each kind within a second, to warm a server up; ``ls`` and ``be`` are prompt and output
    in tokens."""
    rng = random.Random(77)
    rows = requests_of([0.25 * i for i in range(4)], fixed_lengths(*ls), rng)
    return [
        *random_tokens(rows, rng, tier=LS_TIER, vocab_size=vocab_size, slo=slo),
        *backlog(rng, count=4, prompt=be[0], output=be[1], vocab_size=vocab_size),
    ]


@contextmanager
def warm_server(
    name: str, arguments: Sequence[str], warm_up: Sequence[LoadRequest], cutoff_s: float = 120.0
) -> Iterator[ServerProcess]:
    """Give a server of its own, with this command line, that has served ``warm_up``; its log is ``.cache/NAME.log``.

    Raises:
        ServerFailed: It did not start or stop, or did not serve the requests in time.
    """
    with ServerProcess([*arguments, *SETTLED], ROOT / ".cache" / f"{name}.log") as server:
        server.wait_until_healthy()
        drive(server, warm_up, cutoff_s=cutoff_s)
        yield server
