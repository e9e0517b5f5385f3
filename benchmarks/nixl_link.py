"""Times messages between an engine and a CPU host or a prefill engine, over plain TCP and through NIXL.

    pip install --no-deps nixl nixl-cu12
    python -m benchmarks.nixl_link --record benchmarks/results/nixl_link.json

Two processes of this machine: one sends a message, the other answers with one. ``tcp``: a socket as OmniServe's links
have it, without their checksums. ``nixl``: a write into the other's registered memory with a notification, by UCX over
TCP, which is what machines without RDMA have. Both sides ask NIXL without pause whether something has come, as it has
nothing to wait for; with ``--progress-thread`` a thread of NIXL's does so, too. ``rows``: q, k and v of so many rows of
Llama-3-8B's heads in bf16 there, the results back. ``blocks``: KV of a prompt there, and a byte back. In turn each has
some rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from omniserve.host.cores import available_cores

_ROW_BYTES = 2 * (32 + 2 * 8) * 128
_RESULT_BYTES = 2 * 32 * 128
_MIB = 1 << 20


class _Tcp:
    """A message there or back over a socket."""

    def __init__(self, connection: socket.socket, out: torch.Tensor, back: torch.Tensor) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._out, self._back = connection, out, back

    def send(self, count: int) -> None:
        self._connection.sendall(self._out.numpy().data[:count])

    def receive(self, count: int) -> None:
        view, done = self._back.numpy().data, 0
        while done < count:
            got = self._connection.recv_into(view[done:count])
            if not got:
                raise EOFError("the other end has gone")
            done += got


class _Nixl:
    """A message there or back through NIXL."""

    def __init__(self, name: str, pipe: Connection, out: torch.Tensor, back: torch.Tensor, has_thread: bool) -> None:
        os.environ["UCX_TLS"] = "tcp"
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))
        for tensor in (out, back):
            if self._agent.register_memory(tensor) is None:
                raise RuntimeError("NIXL cannot register memory")
        self._out, self._handles = out, dict[int, Any]()
        pipe.send((self._agent.get_agent_metadata(), back.data_ptr()))
        metadata, self._theirs = pipe.recv()
        self._other = self._agent.add_remote_agent(metadata)

    def send(self, count: int) -> None:
        handle = self._handles.get(count)
        if handle is None:
            ends = [self._agent.get_xfer_descs([(at, count, 0)], "DRAM") for at in (self._out.data_ptr(), self._theirs)]
            handle = self._handles[count] = self._agent.initialize_xfer("WRITE", *ends, self._other, b"come")
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer of NIXL ended as {state}")

    def receive(self, count: int) -> None:
        while not self._agent.get_new_notifs():
            pass


def _arms(
    name: str, connection: socket.socket, pipe: Connection, size: int, options: argparse.Namespace
) -> dict[str, _Tcp | _Nixl]:
    out, back = torch.zeros(2, size, dtype=torch.uint8)
    arms: dict[str, _Tcp | _Nixl] = {"tcp": _Tcp(connection, out, back)}
    if "nixl" in options.arms:
        arms["nixl"] = _Nixl(name, pipe, out, back, options.progress_thread)
    return arms


def _answer(
    address: tuple[str, int], size: int, options: argparse.Namespace, pipe: Connection,
    plan: list[tuple[str, int, int, int]],
) -> None:  # fmt: skip
    """Be the other process: for each part of a plan, an arm, take messages and answer them."""
    with socket.create_connection(address) as connection:
        arms = _arms("there", connection, pipe, size, options)
        for arm, there, answer, rounds in plan:
            for _ in range(rounds):
                arms[arm].receive(there)
                arms[arm].send(answer)
        pipe.recv()


def _measure(
    send: Callable[[int], None], receive: Callable[[int], None], there: int, back: int, rounds: int
) -> list[float]:
    seconds = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        send(there)
        receive(back)
        seconds.append(time.perf_counter() - began_s)
    return seconds


def main() -> None:
    parser = argument_parser(
        __doc__, "nixl_link", arms=["tcp", "nixl"], rows=([1, 32, 400], "of a message"), blocks=([1, 64], "MiB of KV"),
        rounds=(40, "messages of an arm in its turn"), turns=10,
        progress_thread=(False, "NIXL has a thread that makes progress"),
    )  # fmt: skip
    args = parser.parse_args()
    loads = {f"{rows} rows": (rows * _ROW_BYTES, rows * _RESULT_BYTES) for rows in args.rows}
    loads |= {f"{size} MiB of blocks": (size * _MIB, 1) for size in args.blocks}
    size = max(there for there, _ in loads.values())
    plan = [
        (arm, *sizes, args.rounds)
        for turn in range(args.turns)
        for sizes in loads.values()
        for arm in (args.arms if turn % 2 else reversed(args.arms))
    ]
    raw: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in args.arms} for name in loads}
    names = {sizes: name for name, sizes in loads.items()}
    pipe, other = multiprocessing.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = multiprocessing.get_context("spawn").Process(
            target=_answer, args=(server.getsockname(), size, args, other, plan)
        )
        process.start()
        connection, _ = server.accept()
    arms = _arms("here", connection, pipe, size, args)
    for arm, there, answer, rounds in plan:
        seconds = _measure(arms[arm].send, arms[arm].receive, there, answer, rounds)
        raw[names[there, answer]][arm] += seconds[1:]  # the first of a turn finds caches of the other arm
    pipe.send(None)
    process.join()
    results = {name: {arm: _summary(seconds) for arm, seconds in measured.items()} for name, measured in raw.items()}
    print(table_of([_row(name, summary) for name, summary in results.items()]))
    config = {**vars(args), "cores": available_cores(), "UCX_TLS": "tcp"}
    write_record(Path(args.record), name="nixl_link", config=config, seed=0, results=results)


def _summary(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_s": statistics.median(seconds), "p99_s": cuts[98], "count": len(seconds)}


def _row(name: str, summary: dict[str, dict[str, float]]) -> dict[str, str]:
    cells = {f"{arm}, p50 (p99), ms": f"{1e3 * s['p50_s']:.2f} ({1e3 * s['p99_s']:.2f})" for arm, s in summary.items()}
    return {"": name, **cells}


if __name__ == "__main__":
    main()
