"""KV between the tiers: bytes a second of moves, alone and beside decode steps, and what they cost these."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.clock import reclaim_memory, seconds
from benchmarks.gpu.engines import config_of, open_decoding, renew, step_times
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.table import Goal
from omniserve import Engine
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.plan import HostEventKind, KVMove, MoveDirection

GOAL = Goal(at_least=0.8)
SLOWER = Goal(at_most=1.05)
_BLOCK = 64
_PATIENCE_S = 20.0


class Mover:
    """Moves blocks between a device pool and a host pool that nobody else uses."""

    def __init__(self, model: Any, bench: Bench, num_blocks: int) -> None:
        patched = model.omniserve
        config = config_of(model, block_size=_BLOCK, max_host_requests=1)
        self.block_bytes = patched.spec.kv_block_bytes(_BLOCK)
        self.tier = HostTier.of(
            config, patched.spec, dtype=patched.dtype, device=patched.device, num_threads=bench.limits.host_threads,
            kv_bytes=num_blocks * self.block_bytes,
        )  # fmt: skip
        self.storage = DeviceKVStorage(
            patched.spec, num_blocks=num_blocks, block_size=_BLOCK, dtype=patched.dtype, device=patched.device
        )
        self.storage.k_LBKSH.normal_()
        self.storage.v_LBKSH.normal_()
        self._next_id = 0

    def seconds(self, count: int, direction: MoveDirection, meanwhile: Callable[[], object] | None = None) -> float:
        """Move the first ``count`` blocks and return how long it took.

        Args:
            count: Of blocks.
            direction: Of the move.
            meanwhile: Called until the move is done; None: this thread waits for it.

        Raises:
            RuntimeError: The move failed, or did not end.
        """
        ids = tuple(range(count))
        move = KVMove(request_id="", move_id=self._next_id, direction=direction, src_block_ids=ids, dst_block_ids=ids)
        self._next_id += 1
        began_s = time.perf_counter()
        self.tier.start_move(move, self.storage.k_LBKSH, self.storage.v_LBKSH)
        while time.perf_counter() - began_s < _PATIENCE_S:
            if meanwhile is None:
                self.tier.wait(0.001)
            else:
                meanwhile()
            for event in self.tier.poll():  # as often as an engine does: once a step
                if event.kind is not HostEventKind.MOVE_DONE:
                    raise RuntimeError(f"a move failed: {event}")
                return time.perf_counter() - began_s
        raise RuntimeError(f"a move of {count} blocks was not over after {_PATIENCE_S:.0f} s")


def run(bench: Bench) -> None:
    """Time moves of few and many blocks alone, then beside decode steps, and these steps beside moves."""
    model = bench.shelf.patched(LLAMA_8B)
    counts, repeats = ((1, 4), 2) if bench.dry else ((256, 16, 1), 5)
    batch, context, steps, output = (2, 40, 5, 1024) if bench.dry else (32, 1024, 40, 1024)
    reclaim_memory(bench.device)
    mover = Mover(model, bench, max(counts))
    try:
        # A move's end is seen between two steps, or after a sleep: only of a long one that is a small part.
        goals = {max(counts): GOAL}
        for count in counts:
            _take(bench, mover, count, repeats, "alone", None, goals.get(count))
        with open_decoding(model, batch=batch, context=context, output=output) as engine:
            for count in counts[:2]:
                _take(bench, mover, count, repeats, f"beside steps of {batch} rows", engine.step, goals.get(count))
            renew(engine, batch, context, output)
            alone_s = step_times(engine, steps).mean_s
            for direction in MoveDirection:
                renew(engine, batch, context, output)  # at the context that they had alone
                bench.take(
                    f"step of {batch} rows beside moves {direction.value.replace('_', ' ')}", "ms",
                    functools.partial(_step_ms, bench, engine, mover, max(counts), direction),
                    floor=1e3 * alone_s, goal=SLOWER,
                )  # fmt: skip
    finally:
        mover.tier.close()


def _take(
    bench: Bench,
    mover: Mover,
    count: int,
    repeats: int,
    beside: str,
    meanwhile: Callable[[], object] | None,
    goal: Goal | None,
) -> None:
    limits = {
        MoveDirection.TO_HOST: bench.limits.to_host_bytes_per_s,
        MoveDirection.TO_DEVICE: bench.limits.to_device_bytes_per_s,
    }
    for direction, limit in limits.items():

        def rate(direction: MoveDirection = direction) -> Measured:
            mover.seconds(count, direction, meanwhile)
            times_s = [mover.seconds(count, direction, meanwhile) for _ in range(repeats)]
            taken_s = statistics.median(times_s)
            return Measured(
                value=count * mover.block_bytes / taken_s / 1e9, note=f"{1e3 * taken_s:.3g} ms",
                details={"seconds": times_s},
            )  # fmt: skip

        mib = count * mover.block_bytes / (1 << 20)
        bench.take(
            f"{count} blocks ({mib:.0f} MiB) {direction.value.replace('_', ' ')}, {beside}", "GB/s", rate,
            floor=limit / 1e9, goal=goal,
        )  # fmt: skip


def _step_ms(bench: Bench, engine: Engine, mover: Mover, count: int, direction: MoveDirection) -> Measured:
    """Return the mean milliseconds of steps while moves follow one another."""
    done = 0

    def step() -> None:
        nonlocal done
        engine.step()
        done += 1

    moves = 1 if bench.dry else 4
    taken_s = seconds(lambda: [mover.seconds(count, direction, step) for _ in range(moves)], bench.device)
    return Measured(value=1e3 * taken_s / done, note=f"{done} steps beside {moves} moves")
