"""Block moves in both directions beside steps, to the bit.

Random blocks go from a device pool to a host pool and back while an engine's steps run on the same device, and while
other blocks are written just before their move. A shadow on the CPU makes the same moves; in the end all pools agree.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from benchmarks.gpu.check_steps import described, open_tiny, serve
from benchmarks.gpu.script import Script
from omniserve import patch
from omniserve.core.plan import HostEventKind, KVMove, MoveDirection
from tests.host.helpers import assert_same_bits, make_spec, make_tier, read_pool, write_blocks
from tests.parity.engine_histories import Reference
from tests.parity.models import tiny_model

_PATIENCE_S = 20.0
_DEVICE_BLOCKS, _HOST_BLOCKS = 60, 90


def blocks(script: Script) -> None:
    model: Any = tiny_model("llama")
    reference = Reference(model, num_prompts=4 if script.dry else 12)
    patch(model.to(script.device), compile=False)
    count = 20 if script.dry else 300
    for dtype in (torch.bfloat16, torch.float32):
        with script.case(f"{count} moves of {dtype} blocks") as case:
            pools = Pools(script.device, dtype, count)
            with open_tiny(model) as engine:
                try:
                    while pools.num_moves < count:
                        serve(engine, reference, meanwhile=pools.advance)
                    pools.finish()
                finally:
                    pools.tier.close()
                case.note = f"{pools.num_moves} moves, {pools.num_blocks} blocks, beside {described(engine)}"


class Pools:
    """A device pool and a host pool with moves between them, and a shadow of both on the CPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype, most_moves: int) -> None:
        spec = make_spec(dtype, num_heads=8, num_kv_heads=4, head_size=64)
        is_gpu = device.type == "cuda"
        self.tier = make_tier(spec, dtype=dtype, num_blocks=_HOST_BLOCKS, pin_memory=is_gpu)
        self.num_moves = self.num_blocks = 0
        self._most_moves = most_moves
        shape = (spec.num_layers, _DEVICE_BLOCKS, spec.num_kv_heads, 16, spec.head_size)
        self._shadow = [torch.randn(shape).to(dtype) for _ in "kv"]
        self._device = [side.to(device, copy=True) for side in self._shadow]
        host_shape = (spec.num_layers, _HOST_BLOCKS, *shape[2:])
        self._host_shadow = [torch.randn(host_shape).to(dtype) for _ in "kv"]
        write_blocks(self.tier, slice(None), range(_HOST_BLOCKS), *self._host_shadow)
        self._rng = random.Random(0)
        self._running: dict[int, KVMove] = {}
        self._since_s = time.monotonic()

    def advance(self) -> None:
        """Take the events of moves that are over; where none runs any more, start several, of blocks that differ."""
        self._poll()
        if not self._running and self.num_moves < self._most_moves:
            self._since_s = time.monotonic()
            device_ids = self._rng.sample(range(_DEVICE_BLOCKS), _DEVICE_BLOCKS)
            host_ids = self._rng.sample(range(_HOST_BLOCKS), _DEVICE_BLOCKS)
            for _ in range(self._rng.randint(1, 5)):
                count = self._rng.randint(1, 8)
                self._start([device_ids.pop() for _ in range(count)], [host_ids.pop() for _ in range(count)])

    def _poll(self) -> None:
        for event in self.tier.poll():
            assert event.kind is HostEventKind.MOVE_DONE, event
            move = self._running.pop(event.move_id)
            if move.direction is MoveDirection.TO_HOST:  # its device blocks are free: whatever is written now is late
                for side in (*self._device, *self._shadow):
                    side[:, list(move.src_block_ids)] = torch.nan
        assert not self._running or time.monotonic() - self._since_s < _PATIENCE_S, f"never over: {self._running}"

    def _start(self, device_ids: list[int], host_ids: list[int]) -> None:
        to_host = self._rng.random() < 0.5
        for device, shadow, host in zip(self._device, self._shadow, self._host_shadow, strict=True):
            if to_host:  # written by the step that the move follows
                new = torch.randn(shadow[:, device_ids].shape).to(shadow.dtype)
                device[:, device_ids] = new.to(device.device)
                shadow[:, device_ids] = host[:, host_ids] = new
            else:
                shadow[:, device_ids] = host[:, host_ids]
        src, dst = (device_ids, host_ids) if to_host else (host_ids, device_ids)
        direction = MoveDirection.TO_HOST if to_host else MoveDirection.TO_DEVICE
        move = KVMove(
            request_id="", move_id=self.num_moves, direction=direction, src_block_ids=tuple(src),
            dst_block_ids=tuple(dst),
        )  # fmt: skip
        self.tier.start_move(move, *self._device)
        self._running[move.move_id] = move
        self.num_moves += 1
        self.num_blocks += len(src)

    def finish(self) -> None:
        """Wait for what runs, and compare the pools with their shadows."""
        while self._running:
            self.tier.wait(0.01)
            self._poll()
        for device, shadow in zip(self._device, self._shadow, strict=True):
            assert_same_bits(device.cpu(), shadow)
        for pool, shadow in zip(read_pool(self.tier), self._host_shadow, strict=True):
            assert_same_bits(pool.contiguous(), shadow)
