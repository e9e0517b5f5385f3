"""Sending a load to a server from start to end, where everything but a rejection is expected to succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from benchmarks.common.client import OMNISERVE_WIRE, LoadRequest, RequestRecord, Wire, run_load
from benchmarks.common.server import Server, ServerFailed


def drive(
    server: Server,
    requests: Sequence[LoadRequest],
    *,
    cutoff_s: float,
    may_be_cut_off: bool = False,
    must_finish: Callable[[LoadRequest], bool] = lambda _: True,
    wire: Wire = OMNISERVE_WIRE,
) -> tuple[list[RequestRecord], float]:
    """Send ``requests`` and wait for those that ``must_finish`` selects, but no longer than ``cutoff_s``.

    Returns:
        One record per request, in their order, and the seconds after which the load ended.

    Raises:
        ServerFailed: The server ended; or a request ended with another error than a rejection; or, unless it may, was
            cut off.
    """

    async def watch(_: float, __: Sequence[RequestRecord]) -> None:
        server.check_alive()

    records, end_s = asyncio.run(
        run_load(server.base_url, requests, must_finish=must_finish, cutoff_s=cutoff_s, watch=watch, wire=wire)
    )
    for request, record in zip(requests, records, strict=True):
        if record.finished or record.rejected:
            continue
        if record.error is not None:
            raise ServerFailed(f"a request failed: {record.error}\n{server.log_tail()}")
        if must_finish(request) and not may_be_cut_off:
            raise ServerFailed(f"a request did not finish in {cutoff_s:g} s\n{server.log_tail()}")
    return records, end_s
