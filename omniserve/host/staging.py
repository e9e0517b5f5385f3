"""StagedMover: moves between a CUDA cache and an int8 host pool go through a pinned staging buffer, chunk by chunk.

A chunk of blocks takes two hops beside the step. To the host, the device gathers the blocks and copies them into the
buffer (side stream), then the worker threads copy from there to the pool, as int8 values with scales. To the device the
order is reversed. Without the contiguous buffer there would be a cudaMemcpy per block, layer and K or V: thousands of
these cost the step more than the move.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniserve.core.plan import HostEvent, KVMove, MoveDirection
from omniserve.host.mover import Mover, end_of

_STAGING_BYTES = 128 << 20
_COPY_ID = -2  # move_id of the worker threads' copies; move ids of callers are >= 0, and -1 means none


class StagedMover(Mover):
    """Runs moves one after the other; `advance` starts the next hop.

    `block_shape` is ``[L, K, S, H]`` of a block's K, `dtype` the cache's. `host_copy` is as in `HostMoves`; the events
    of its copies go to `takes`. The staging buffer has `staging_bytes`, but room for one block in any case. With
    `pin_memory` it is page-locked and allocated now: to do so later would stall a step.
    """

    def __init__(
        self,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        num_pool_blocks: int,
        host_copy: Callable[..., None],
        *,
        pin_memory: bool,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        super().__init__()
        self._block_shape = torch.Size(block_shape)
        self._dtype = dtype
        self._host_copy = host_copy
        self._pin_memory = pin_memory
        block_bytes = 2 * self._block_shape.numel() * dtype.itemsize
        self._chunk_blocks = max(1, min(num_pool_blocks, staging_bytes // block_bytes))
        self._staging: Tensor | None = self._new_staging() if pin_memory else None
        self._first_block = 0  # blocks [0, first_block) of the current move have arrived
        self._hop = 0  # how many hops of the current chunk were started
        self._hop_is_done: Callable[[], bool] = lambda: True
        self._copying_on_host = False
        self._error = ""

    @property
    def num_moves(self) -> int:
        return len(self._queue) - self._copying_on_host

    @property
    def can_advance(self) -> bool:
        return self.busy and not self._copying_on_host and self._hop_is_done()

    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        self._follow_current_stream(device_k_LBKSH.device)
        self._queue.append((move, (device_k_LBKSH, device_v_LBKSH)))

    def takes(self, move_id: int, message: str) -> bool:
        if move_id != _COPY_ID:
            return False
        self._copying_on_host = False
        self._error = message
        return True

    def advance(self) -> list[HostEvent]:
        events: list[HostEvent] = []
        while self.can_advance:
            move, caches = self._queue[0]
            if self._closed and not self._error:
                self._error = "the host tier was closed"
                self.num_failures += 1
            if not self._error:
                try:
                    if self._next_hop(move, caches):
                        continue
                except RuntimeError as error:  # out of memory or a CUDA error fails this move, not the step
                    self._hop_is_done = self._when_done()  # a copy that was launched still uses the move's blocks
                    self._error = f"a move failed on the device: {error}"
                    self.num_failures += 1
                    continue
            events.append(end_of(move, self._error))
            self._queue.popleft()
            self._first_block = self._hop = 0
            self._error = ""
        return events

    def _next_hop(self, move: KVMove, caches: tuple[Tensor, Tensor]) -> bool:
        """Start the next hop of the current chunk, or the first of the next one; False when all blocks have arrived."""
        if self._hop == 2:
            self._first_block += self._chunk_blocks
            self._hop = 0
        chunk = slice(self._first_block, self._first_block + self._chunk_blocks)
        src, dst = move.src_block_ids[chunk], move.dst_block_ids[chunk]
        if not src:
            return False
        to_host = move.direction is MoveDirection.TO_HOST
        if self._staging is None:
            self._staging = self._new_staging()
        shape = self._block_shape
        staging = [half[: shape.numel() * len(src)].view(shape[0], len(src), *shape[1:]) for half in self._staging]
        if (self._hop == 0) == to_host:
            ids = src if to_host else dst
            self._hop_is_done = self._on_device(caches, staging, ids, to_host, is_reversed=move.is_reversed)
        else:
            self._host_copy(_COPY_ID, to_host, *staging, tuple(range(len(src))), dst if to_host else src)
            self._copying_on_host = True
        self._hop += 1
        return True

    def _on_device(
        self, caches: tuple[Tensor, Tensor], staging: list[Tensor], ids: Sequence[int], to_host: bool, *,
        is_reversed: bool,
    ) -> Callable[[], bool]:  # fmt: skip
        """Copy between blocks and staging buffer on the side stream; return a function that tells when it is done."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # without CUDA the stream is None: no stream
            # From pinned memory: a blocking copy of the ids would wait for all that the side stream waits for.
            index = torch.tensor(ids, pin_memory=self._pin_memory).to(caches[0].device, non_blocking=True)
            for cache, buffer in zip(caches, staging, strict=True):
                if to_host:
                    blocks = cache.index_select(1, index)
                    buffer.copy_(blocks.flip(3) if is_reversed else blocks, non_blocking=True)
                else:
                    blocks = buffer.to(cache.device, non_blocking=True)
                    cache.index_copy_(1, index, blocks.flip(3) if is_reversed else blocks)
            return self._when_done()

    def _new_staging(self) -> Tensor:
        """Return ``[2, numel of a chunk of K]``; a chunk of fewer blocks uses the start of each half."""
        numel = self._chunk_blocks * self._block_shape.numel()
        return torch.empty(2, numel, dtype=self._dtype, pin_memory=self._pin_memory)
