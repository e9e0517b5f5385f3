"""The rates of the hardware; KV between the tiers: bytes a second of moves beside PCIe, and what steps then take."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

from benchmarks.common.timing import seconds
from benchmarks.gpu.engines import LLAMA_8B, open_decoding, patched_model, reclaim_memory, renew, step_ms
from benchmarks.gpu.script import Script
from omniserve.core.setup import HostTierSetup
from omniserve.core.work import Done, KVMove, MoveDirection
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage

_BLOCK = 64
_PATIENCE_S = 20.0


def moves(script: Script) -> None:
    model = patched_model(LLAMA_8B, script)
    counts = (4, 1) if script.dry else (256, 16, 1)
    batch, context, steps, output = (2, 40, 5, 1024) if script.dry else (32, 1024, 40, 1024)
    limits = {
        MoveDirection.TO_HOST: script.limits.to_host_bytes_per_s,
        MoveDirection.TO_DEVICE: script.limits.to_device_bytes_per_s,
    }
    reclaim_memory(script.device)
    patched = model.omniserve
    block_bytes = patched.spec.kv_block_bytes(_BLOCK)
    setup = HostTierSetup(
        block_size=_BLOCK, kv_bytes=max(counts) * block_bytes, num_slots=1, num_threads=script.limits.host_threads,
        pin_memory=script.on_gpu,
    )  # fmt: skip
    tier = HostTier(setup, spec=patched.spec, dtype=patched.dtype, device=patched.device)
    storage = DeviceKVStorage(
        patched.spec, num_blocks=max(counts), block_size=_BLOCK, dtype=patched.dtype, device=patched.device
    )
    storage.k_LBKSH.normal_()
    storage.v_LBKSH.normal_()
    ids = itertools.count()

    def move_s(count: int, direction: MoveDirection, meanwhile: Callable[[], object] | None) -> float:
        """Move the first blocks and return how long it took; without ``meanwhile`` this thread waits for it."""
        blocks = tuple(range(count))
        move = KVMove(
            request_id="", move_id=next(ids), direction=direction, src_block_ids=blocks, dst_block_ids=blocks
        )  # fmt: skip
        began_s = time.perf_counter()
        tier.start_move(move, storage.k_LBKSH, storage.v_LBKSH)
        while time.perf_counter() - began_s < _PATIENCE_S:
            if meanwhile is None:
                tier.wait(0.001)
            else:
                meanwhile()
            for event in tier.poll():  # as often as an engine does: once a step
                if not (isinstance(event, Done) and event.ok):
                    raise RuntimeError(f"a move failed: {event}")
                return time.perf_counter() - began_s
        raise RuntimeError(f"a move of {count} blocks was not over after {_PATIENCE_S:.0f} s")

    def time_moves(count: int, beside: str, meanwhile: Callable[[], object] | None) -> None:
        num_bytes = count * block_bytes
        for direction, limit in limits.items():
            with script.case(f"{count} blocks ({num_bytes >> 20} MiB) {_name(direction)}, {beside}") as case:
                times_s = [move_s(count, direction, meanwhile) for _ in range(3 if script.dry else 6)][1:]
                taken_s = statistics.median(times_s)
                case.figure(
                    num_bytes / taken_s / 1e9, "GB/s", limit=limit / 1e9,
                    # A move's end is seen between two steps, or after a sleep: only of a long one that is a small part.
                    at_least=0.8 if count > 16 else None, note=f"{1e3 * taken_s:.3g} ms", seconds=times_s,
                )  # fmt: skip

    try:
        for count in counts:
            time_moves(count, "alone", None)
        with open_decoding(model, batch=batch, context=context, output=output) as engine:
            for count in counts[:2]:
                time_moves(count, f"beside steps of {batch} rows", engine.step)
            renew(engine, batch, context, output)
            alone_ms, _ = step_ms(engine, steps)
            for direction in MoveDirection:
                with script.case(f"step of {batch} rows beside moves {_name(direction)}") as case:
                    renew(engine, batch, context, output)  # at the context that they had alone
                    before, several = engine.stats().steps, range(1 if script.dry else 4)
                    taken_s = seconds(
                        lambda: [move_s(max(counts), direction, engine.step) for _ in several],  # noqa: B023
                        script.device,
                    )  # fmt: skip
                    done = engine.stats().steps - before
                    case.figure(
                        1e3 * taken_s / done, "ms", limit=alone_ms, at_most=1.05,
                        note=f"limit: without moves; {done} steps beside {len(several)} moves",
                    )  # fmt: skip
    finally:
        tier.close()


def _name(direction: MoveDirection) -> str:
    return direction.value.replace("_", " ")


def limits(script: Script) -> None:
    """Record all limits of the hardware."""
    found = script.limits
    rates: dict[str, tuple[Callable[[], float], float, str]] = {
        "copy inside device memory, read + written": (lambda: found.copy_bytes_per_s, 1e-9, "GB/s"),
        "bf16 matrix product": (lambda: found.matmul_flops, 1e-12, "TFLOP/s"),
        "PCIe to the device, page-locked, one piece": (lambda: found.to_device_bytes_per_s, 1e-9, "GB/s"),
        "PCIe to the host, page-locked, one piece": (lambda: found.to_host_bytes_per_s, 1e-9, "GB/s"),
        "small kernel, launched from Python": (lambda: found.launch_s(in_graph=False), 1e6, "us"),
        "small kernel, in a CUDA graph": (lambda: found.launch_s(in_graph=True), 1e6, "us"),
        f"main memory, read by {found.host_threads} threads": (lambda: found.host_read_bytes_per_s, 1e-9, "GB/s"),
    }
    for name, (measure, factor, unit) in rates.items():
        with script.case(name) as case:
            case.figure(factor * measure(), unit)
