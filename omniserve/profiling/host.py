"""The host tier alone: its attention, moves of KV, and what piggyback rows add to a layer of a step.

Legend: T device rows, P seats, D hidden, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypedDict

import torch
from torch import Tensor

from omniserve.core.config import EngineConfig
from omniserve.core.setup import HostTierSetup
from omniserve.core.work import AttentionResult, Done, KVMove, MoveDirection
from omniserve.host.cores import CoreSplit
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.latency.features import AlphaBeta
from omniserve.latency.fitting import fit_terms
from omniserve.latency.profile import Fingerprint, Table
from omniserve.layers.patched_model import PatchedModel
from omniserve.profiling.bench import Served, zeroed_storage
from omniserve.profiling.timer import Progress, Timer
from omniserve.runner.piggyback_rows import PiggybackRows

_HOST_END = 0.62  # share of the time limit at which this is over
_MAX_POOL_BYTES = 256 << 20
_MAX_LAYERS = 8  # tasks of so many layers are timed, one layer after the other
_WAIT_S = 0.01
_PATIENCE_S = 60.0
_DEVICE_ROWS = 16
_DRAFTS = 3  # of each task that has some


class HostTimes(TypedDict, total=False):
    """Fields of a Profile; see there. Without a host tier there are none."""

    piggyback: Table
    host_attention: Table
    host_drafts: Table
    copy_to_host: AlphaBeta
    copy_to_device: AlphaBeta


class _HostBench:
    """A host tier for measurements alone, with a mailbox if an engine's has one."""

    def __init__(
        self,
        model: PatchedModel,
        config: EngineConfig,
        threads: int,
        *,
        pool_bytes: int = _MAX_POOL_BYTES,
        served: Served | None = None,
    ) -> None:
        self.model, self.config = model, config
        self._served = served or Served(model, config)
        self.spec = model.spec
        setup = HostTierSetup.of(
            config,
            num_threads=threads,
            max_rows=1 if self.spec.state_bytes else 1 + _DRAFTS,
            pin_memory=model.device.type == "cuda",
            mailbox=self._served.mailbox,
        )
        setup = dataclasses.replace(setup, kv_bytes=min(config.host_kv_bytes, pool_bytes))
        self.tier = HostTier(setup, spec=model.spec, dtype=model.dtype, device=model.device, layers=model.layers)
        self.tier.pool_LBK2SH.zero_()  # pages that were never written are all one page, in every cache
        self._epoch, self._move_ids = 0, itertools.count()
        self._sending: PiggybackRows | None = None
        if self._served.mailbox:
            self._sending = PiggybackRows(model, self.tier, config.max_host_requests)
        self._passes: dict[tuple[int, int], Callable[[], object]] = {}

    def qkv(self, count: int) -> list[Tensor]:
        """Return random rows ``[count, N, H]``, ``[count, K, H]``, ``[count, K, H]`` in host memory."""
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        return [torch.randn(count, each, self.spec.head_size).to(self.model.dtype) for each in heads]

    def bind(self, num_requests: int, context: int, num_rows: int = 1) -> Tensor:
        """Bind slots to ``num_rows`` tokens each, at the end of ``context`` keys; return the slot of each token."""
        blocks = -(-context // self.config.block_size)
        for slot in range(num_requests):
            self._epoch += 1
            first = slot * blocks
            ids = tuple(range(first, first + blocks))
            self.tier.begin_token(slot, self._epoch, context - num_rows, ids, num_rows)
        return torch.arange(num_requests).repeat_interleave(num_rows)

    def wait_for(self, count: int, kind: type[AttentionResult | Done]) -> None:
        """Wait for ``count`` events of a type.

        Raises:
            RuntimeError: A task or a move failed, or no event has come for too long.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while count > 0:
            for event in self.tier.poll():
                if not (isinstance(event, kind) and event.ok):
                    raise RuntimeError(f"the host tier failed while it was measured: {event}")
                count -= 1
            if count > 0:
                self.tier.wait(_WAIT_S)
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"the host tier did not answer for {_PATIENCE_S:.0f} s while it was measured")

    def attention(self, num_requests: int, context: int, num_drafts: int = 0) -> float:
        """Return the seconds of one layer's tasks: ``num_requests`` of them with ``context`` keys and drafts each."""
        slots = self.bind(num_requests, context, 1 + num_drafts)
        q, k, v = self.qkv(len(slots))
        layers = self.model.layers[:_MAX_LAYERS]
        began_s = time.perf_counter()
        for layer in layers:
            self.tier.submit(layer, slots, q, k, v)
            self.wait_for(num_requests, AttentionResult)
        return (time.perf_counter() - began_s) / len(layers)

    def grid(self) -> list[tuple[int, int]]:
        """Return (requests, context of each), smallest load first."""
        longest = min(self.config.max_model_len or self.spec.max_model_len, self.spec.max_model_len)
        requests = [r for r in (1, 4, 16, 64) if r <= self.config.max_host_requests]
        lengths = sorted({max(1, longest // part) for part in (64, 8, 2)})
        fits = [
            (r, n) for r in requests for n in lengths if r * -(-n // self.config.block_size) <= self.tier.num_blocks
        ]
        return sorted(fits, key=lambda point: point[0] * point[1])

    def grid_of_drafts(self) -> list[tuple[int, int]]:
        """Return the points at which tasks with drafts are measured, too."""
        if self.tier.max_rows == 1:
            return []
        return [(requests, context) for requests, context in self.grid() if context > _DRAFTS][1::2]

    def piggyback(self, num_seats: int, num_rows: int, timer: Timer) -> float:
        """Return the seconds of a layer's work for piggyback rows, besides the halves."""
        if self._sending is None:
            return self._by_call(num_seats, num_rows, timer)
        key = num_seats, num_rows
        if key not in self._passes:
            with timer.preparing():
                run = self._through_mailbox(self._sending, num_seats, num_rows)
                self._passes[key] = self._served.launched(run)
                self._passes[key]()
        return timer.time(self._passes[key]) / self.spec.num_layers

    def _through_mailbox(self, sending: PiggybackRows, num_seats: int, num_rows: int) -> Callable[[], Tensor]:
        """Return the device's work of all layers: sending rows to the mailbox, and results and residuals that join.

        In constant shapes every layer looks at every seat, whether rows leave it or not. The tier expects no row: it
        attends beside the device, and what the host does for a step (``bring``, ``announce``) is a step's overhead.
        """
        device, dtype, spec = self.model.device, self.model.dtype, self.spec
        rows_P = sending.empty_seats(num_seats)
        rows_P[:num_rows] = torch.arange(num_rows, device=device) * self.tier.max_rows
        attn_TD = torch.zeros(_DEVICE_ROWS, spec.num_heads * spec.head_size, dtype=dtype, device=device)
        rows = _DEVICE_ROWS + num_seats
        hidden_TD = torch.zeros(rows, spec.hidden_size, dtype=dtype, device=device)
        q_TNH, k_TKH, v_TKH = (each.to(device) for each in self.qkv(rows))
        leave = num_rows > 0 or self._served.constant

        def run() -> Tensor:
            ops = torch.ops.omniserve
            for _ in range(spec.num_layers):
                if leave:
                    sending.post(rows_P, hidden_TD, q_TNH, k_TKH, v_TKH)
                ops.piggyback_concat.default(attn_TD, sending.results_SD, rows_P)
                ops.residual_fetch.default(sending.residuals_SD, rows_P, hidden_TD)
            return hidden_TD

        return run

    def _by_call(self, num_seats: int, num_rows: int, timer: Timer) -> float:
        """Return the seconds of a layer's work where both tiers share the memory, handing over included."""
        dtype, spec = self.model.dtype, self.spec
        seats_P = torch.full((num_seats,), -1, dtype=torch.int64)
        seats_P[:num_rows] = self.bind(num_rows, 1)
        attn_TD = torch.zeros(_DEVICE_ROWS, spec.num_heads * spec.head_size, dtype=dtype)
        hidden_TD = torch.zeros(_DEVICE_ROWS + num_seats, spec.hidden_size, dtype=dtype)
        store_SD = torch.zeros(self.config.max_host_requests, spec.hidden_size, dtype=dtype)
        q, k, v = self.qkv(num_seats)

        def run() -> None:
            ops = torch.ops.omniserve
            rows_P = seats_P if num_rows else torch.full((num_seats,), -1, dtype=torch.int64)
            ops.piggyback_concat.default(attn_TD, self.tier.results_SD, rows_P)
            ops.residual_fetch.default(store_SD, rows_P, hidden_TD)
            if num_rows:
                ops.residual_store.default(hidden_TD, store_SD, seats_P)
                self.tier.submit(self.model.layers.start, seats_P, q, k, v)

        seconds = timer.time(run)
        self.wait_for(num_rows, AttentionResult)
        return seconds

    def move(self, storage: DeviceKVStorage, num_blocks: int, direction: MoveDirection) -> float:
        """Return the seconds of moving some blocks, all layers."""
        ids = tuple(range(num_blocks))
        move = KVMove(
            request_id="", move_id=next(self._move_ids), direction=direction, src_block_ids=ids, dst_block_ids=ids
        )
        began_s = time.perf_counter()
        self.tier.start_move(move, storage.k_LBKSH, storage.v_LBKSH)
        self.wait_for(1, Done)
        return time.perf_counter() - began_s


def measure_host(
    model: PatchedModel, config: EngineConfig, fingerprint: Fingerprint, timer: Timer, progress: Progress
) -> HostTimes:
    """Measure the host tier's attention and moves, and the piggyback overhead w; nothing if there is no host tier.

    Raises:
        RuntimeError: The host tier failed.
    """
    if not fingerprint.host_threads:
        return HostTimes()
    cores = CoreSplit(
        device=model.device, device_threads=fingerprint.device_threads, host_threads=fingerprint.host_threads
    )
    cores.apply(host_works=True)
    attention: list[tuple[float, ...]] = []
    drafts: list[tuple[float, ...]] = []
    counts = sorted({1, fingerprint.host_threads})
    began = timer.spent
    for number, threads in enumerate(counts):
        end = began + (_HOST_END - 0.06 - began) * (number + 1) / len(counts)
        timer.give_way()
        with timer.preparing():  # page-locks memory for a GPU
            bench = _HostBench(model, config, threads, pool_bytes=timer.most_pool_bytes(_MAX_POOL_BYTES))
        with closing(bench.tier):
            kind, with_drafts = f"host attention, {threads} threads", "host attention with drafts"
            drafted = bench.grid_of_drafts() if threads == counts[-1] else []
            for _ in _rounds(timer, end):
                seconds, load = 0.0, 1
                for requests, context in bench.grid():
                    if seconds * requests * context / load > timer.longest_s:
                        break
                    progress("host attention", timer.spent)
                    timer.give_way()
                    seconds, load = bench.attention(requests, context), requests * context
                    timer.add(kind, (requests, context), seconds)
                    if (requests, context) in drafted:
                        timer.give_way()
                        timer.add(with_drafts, (requests, context), bench.attention(requests, context, _DRAFTS))
            attention += [(r, r * context, threads, t) for (r, context), t in timer.typicals(kind)]
            if drafted:
                drafts = [(r, r * context, _DRAFTS, threads, t) for (r, context), t in timer.typicals(with_drafts)]
            if threads == counts[-1]:
                progress("piggyback rows", timer.spent)
                _measure_piggyback(bench, timer)
                progress("moves", timer.spent)
                to_host, to_device = _measure_moves(bench, timer)
    return HostTimes(
        piggyback=tuple((seats, rows, t) for (seats, rows), t in timer.typicals("piggyback")),
        host_attention=tuple(attention),
        host_drafts=tuple(drafts),
        copy_to_host=to_host,
        copy_to_device=to_device,
    )


def _rounds(timer: Timer, end: float, *, least: int = 1, most: int = 7) -> Iterator[int]:
    """Yield numbers of rounds, at least ``least``, then until the share of time is over."""
    for number in range(most):
        if number >= least and timer.spent > end:
            return
        yield number


def _measure_piggyback(bench: _HostBench, timer: Timer) -> None:
    largest = min(bench.config.max_piggyback_seats, bench.config.max_host_requests, bench.tier.num_blocks)
    for _ in _rounds(timer, _HOST_END, least=3, most=25):
        for seats in sorted({1, min(8, largest), largest}):
            for rows in sorted({0, 1, seats}):
                timer.give_way()
                timer.add("piggyback", (seats, rows), bench.piggyback(seats, rows, timer))


def _measure_moves(bench: _HostBench, timer: Timer) -> tuple[AlphaBeta, AlphaBeta]:
    block_bytes = bench.spec.part(bench.model.layers).kv_block_bytes(
        bench.config.block_size, bench.config.execution.kv_dtype
    )
    num_blocks = min(16, bench.tier.num_blocks)
    storage = zeroed_storage(bench.model, num_blocks, bench.config)
    if not timer.counts_preparing:
        with timer.preparing():
            for direction in MoveDirection:
                bench.move(storage, num_blocks, direction)
    for _ in _rounds(timer, _HOST_END, least=2, most=7):
        for direction in MoveDirection:
            for blocks in sorted({1, max(1, num_blocks // 4), num_blocks}):
                timer.give_way()
                timer.add(f"move {direction}", (blocks, 0), bench.move(storage, blocks, direction))

    def fitted(direction: MoveDirection) -> AlphaBeta:
        points = list(timer.typicals(f"move {direction}"))
        alpha, beta = fit_terms([(1.0, blocks * block_bytes) for (blocks, _), _ in points], [t for _, t in points])
        return AlphaBeta(alpha, beta)

    return fitted(MoveDirection.TO_HOST), fitted(MoveDirection.TO_DEVICE)
