"""KV between the tiers: bytes a second of moves beside PCIe, alone and beside steps; what these then take."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common.timing import seconds
from benchmarks.gpu.engines import config_of, open_decoding, renew, step_times
from benchmarks.gpu.models import LLAMA_8B, patched_model
from benchmarks.gpu.script import Script, argument_parser
from benchmarks.gpu.timing import reclaim_memory
from omniserve.core.plan import HostEventKind, KVMove, MoveDirection
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage

_BLOCK = 64
_PATIENCE_S = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    script = Script("moves", argument_parser(__doc__).parse_args(arguments))
    model = patched_model(LLAMA_8B, script)
    counts = (4, 1) if script.dry else (256, 16, 1)
    batch, context, steps, output = (2, 40, 5, 1024) if script.dry else (32, 1024, 40, 1024)
    script.limits.to_host_bytes_per_s, script.limits.to_device_bytes_per_s  # noqa: B018 - before pools take memory
    reclaim_memory(script.device)
    mover = Mover(model, script, max(counts))
    try:
        for count in counts:
            time_moves(script, mover, count, "alone", None)
        with open_decoding(model, batch=batch, context=context, output=output) as engine:
            for count in counts[:2]:
                time_moves(script, mover, count, f"beside steps of {batch} rows", engine.step)
            renew(engine, batch, context, output)
            alone_s = step_times(engine, steps).mean_s
            for direction in MoveDirection:
                with script.case(f"step of {batch} rows beside moves {_name(direction)}") as case:
                    renew(engine, batch, context, output)  # at the context that they had alone
                    before = engine.stats().steps
                    moves = 1 if script.dry else 4
                    several = functools.partial(mover.several, moves, max(counts), direction, engine.step)
                    taken_s = seconds(several, script.device)
                    done = engine.stats().steps - before
                    case.figure(
                        1e3 * taken_s / done, "ms", limit=1e3 * alone_s, at_most=1.05,
                        note=f"limit: without moves; {done} steps beside {moves} moves",
                    )  # fmt: skip
    finally:
        mover.tier.close()
    return script.end()


class Mover:
    """Moves blocks between a device pool and a host pool of its own."""

    def __init__(self, model: Any, script: Script, num_blocks: int) -> None:
        patched = model.omniserve
        config = config_of(model, block_size=_BLOCK, max_host_requests=1)
        self.block_bytes = patched.spec.kv_block_bytes(_BLOCK)
        self.tier = HostTier.of(
            config, patched.spec, dtype=patched.dtype, device=patched.device, num_threads=script.limits.host_threads,
            kv_bytes=num_blocks * self.block_bytes,
        )  # fmt: skip
        self._storage = DeviceKVStorage(
            patched.spec, num_blocks=num_blocks, block_size=_BLOCK, dtype=patched.dtype, device=patched.device
        )
        self._storage.k_LBKSH.normal_()
        self._storage.v_LBKSH.normal_()
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
        self.tier.start_move(move, self._storage.k_LBKSH, self._storage.v_LBKSH)
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

    def several(self, moves: int, count: int, direction: MoveDirection, meanwhile: Callable[[], object]) -> None:
        """Make so many moves, one after the other."""
        for _ in range(moves):
            self.seconds(count, direction, meanwhile)


def time_moves(script: Script, mover: Mover, count: int, beside: str, meanwhile: Callable[[], object] | None) -> None:
    """Time moves of ``count`` blocks in both directions."""
    limits = {
        MoveDirection.TO_HOST: script.limits.to_host_bytes_per_s,
        MoveDirection.TO_DEVICE: script.limits.to_device_bytes_per_s,
    }
    num_bytes = count * mover.block_bytes
    for direction, limit in limits.items():
        with script.case(f"{count} blocks ({num_bytes >> 20} MiB) {_name(direction)}, {beside}") as case:
            mover.seconds(count, direction, meanwhile)
            times_s = [mover.seconds(count, direction, meanwhile) for _ in range(2 if script.dry else 5)]
            taken_s = statistics.median(times_s)
            case.figure(
                num_bytes / taken_s / 1e9, "GB/s", limit=limit / 1e9,
                # A move's end is seen between two steps, or after a sleep: only of a long one that is a small part.
                at_least=0.8 if count > 16 else None, note=f"{1e3 * taken_s:.3g} ms", seconds=times_s,
            )  # fmt: skip


def _name(direction: MoveDirection) -> str:
    return direction.value.replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())
