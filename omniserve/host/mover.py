"""Movers: each moves KV blocks between a CUDA cache and the host pool.

DirectMover launches one kernel for each move, which reads or writes the pool in place (``ops/kernels/blocks.py``). This
takes a pool in the cache's dtype: the kernel converts between the two layouts, but not to int8.

StagedMover is for an int8 pool. A chunk of blocks takes two hops beside the step, through a pinned staging buffer. To
the host, the device gathers the blocks and copies them into the buffer (side stream), then the worker threads copy from
there to the pool, as int8 values with scales. To the device the order is reversed. Without the contiguous buffer there
would be a cudaMemcpy per block, layer and K or V: thousands of these cost the step more than the move.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniserve.core.work import Done, KVMove, MoveDirection
from omniserve.ops.cuda import kernels

_STAGING_BYTES = 128 << 20


class Mover(ABC):
    """Runs moves beside the steps, in the order in which they were started. No method waits for the device.

    Each move ends with one event. Until then its blocks may be read or written on both sides.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        """Moves that failed on the device. Failures of the worker threads are counted by the threads."""
        self.bytes_moved = 0
        """Bytes of finished moves that were copied without the worker threads."""
        self._queue: deque[Any] = deque()  # the moves without their event, oldest first
        self._stream: torch.cuda.Stream | None = None  # None without CUDA, in tests, where everything happens at once
        self._closed = False

    @property
    def busy(self) -> bool:
        """True while there are moves without their event."""
        return bool(self._queue)

    @property
    def num_moves(self) -> int:
        """The number of moves without their event, except one that the worker threads are copying and so count."""
        return len(self._queue)

    @property
    @abstractmethod
    def can_advance(self) -> bool:
        """True when `advance` has something to do."""

    @abstractmethod
    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Queue a valid move behind the work of the current stream; the caller keeps the caches until its event."""

    @abstractmethod
    def advance(self) -> list[Done]:
        """Start the copies that can start, and return the events of the moves that are over."""

    def takes(self, move_id: int, message: str) -> bool:
        """Tell whether an event of the worker threads is about a copy that this mover asked for, and note it then.

        `message` is the event's, empty unless the copy failed.
        """
        return False

    def close(self) -> None:
        """Let moves fail that are started from now on; the caller waits for the device."""
        self._closed = True

    def _follow_current_stream(self, device: torch.device) -> None:
        """Let the side stream wait for the work that the current stream has been given so far."""
        if device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def _when_done(self) -> Callable[[], bool]:
        """Return a function that tells whether the side stream has done all that it was given so far."""
        return self._stream.record_event().query if self._stream is not None else lambda: True


def end_of(move: KVMove, error: str) -> Done:
    """Return the event that ends a move; `error` is empty unless it failed."""
    return Done(move_id=move.move_id, ok=not error, message=error)


def sides(move: KVMove) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a move's device blocks and its pool blocks."""
    ids = move.src_block_ids, move.dst_block_ids
    return ids if move.direction is MoveDirection.TO_HOST else ids[::-1]


@dataclass(frozen=True, slots=True)
class _Copy:
    move: KVMove
    is_over: Callable[[], bool]
    num_bytes: int = 0
    error: str = ""
    ids_2M: Tensor | None = None
    """The block ids on the device, which the kernel reads until the copy is over."""


class DirectMover(Mover):
    """Launches the copy of each move at once, behind those before it. The pool is page-locked.

    Raises:
        ImportError: Triton is not installed.
    """

    def __init__(self, pool_LBK2SH: Tensor) -> None:
        super().__init__()
        self._pool_LBK2SH = pool_LBK2SH
        self._copy_blocks = kernels("blocks").copy_blocks
        if pool_LBK2SH.is_pinned():
            self._compile()

    @property
    def can_advance(self) -> bool:
        return self.busy and self._queue[0].is_over()

    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        if self._closed:
            self._fail(move, "the host tier was closed")
            return
        ids_2M: Tensor | None = None
        try:
            # On the current stream: were this copy to wait on the side stream, torch could reuse no page-locked buffer
            # until the move is over.
            device = device_k_LBKSH.device
            ids_2M = torch.tensor(sides(move), dtype=torch.int64, pin_memory=device.type == "cuda")
            ids_2M = ids_2M.to(device, non_blocking=True)
            self._follow_current_stream(device)
            is_over = self._launch(move, device_k_LBKSH, device_v_LBKSH, ids_2M)
        except RuntimeError as error:  # out of memory or a CUDA error fails this move, not the step
            # A kernel that was launched still uses the move's blocks and ids.
            self._fail(move, f"a move failed on the device: {error}", self._when_done(), ids_2M)
            return
        num_bytes = len(move.src_block_ids) * self._pool_LBK2SH[:, 0].nbytes
        self._queue.append(_Copy(move, is_over, num_bytes, ids_2M=ids_2M))

    def advance(self) -> list[Done]:
        events: list[Done] = []
        while self.can_advance:
            copy: _Copy = self._queue.popleft()
            self.bytes_moved += copy.num_bytes
            events.append(end_of(copy.move, copy.error))
        return events

    def _compile(self) -> None:
        """Compile the kernels of both directions now; otherwise the first moves would stall a step."""
        dtype, shape = self._pool_LBK2SH.dtype, self._pool_LBK2SH.shape[2:]
        pool = torch.empty(1, 1, *shape, dtype=dtype, pin_memory=True)
        device = torch.device("cuda", torch.cuda.current_device())  # the tier made its device current
        cache = torch.empty(1, 1, shape[0], *shape[2:], dtype=dtype, device=device)
        block = torch.zeros(1, dtype=torch.int64, device=device)
        for to_host in (True, False):
            self._copy_blocks(cache, cache, pool, block, block, to_host=to_host, is_reversed=False)
        torch.cuda.synchronize(device)  # before `pool` is freed

    def _fail(
        self, move: KVMove, error: str, is_over: Callable[[], bool] = lambda: True, ids_2M: Tensor | None = None
    ) -> None:
        self.num_failures += 1
        self._queue.append(_Copy(move, is_over, error=error, ids_2M=ids_2M))

    def _launch(
        self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor, ids_2M: Tensor
    ) -> Callable[[], bool]:
        """Launch a copy on the side stream; return a function that tells whether it is done."""
        to_host = move.direction is MoveDirection.TO_HOST
        device_ids_M, pool_ids_M = ids_2M
        with torch.cuda.stream(self._stream):  # None, without CUDA: no stream
            self._copy_blocks(
                device_k_LBKSH,
                device_v_LBKSH,
                self._pool_LBK2SH,
                device_ids_M,
                pool_ids_M,
                to_host=to_host,
                is_reversed=move.is_reversed,
            )
            return self._when_done()


class StagedMover(Mover):
    """Runs moves one after the other; `advance` starts the next hop.

    `block_shape` is ``[L, K, S, H]`` of a block's K, `dtype` the cache's. `host_copy` is as in `HostMoves`; the events
    of its copies, which have the move id `copy_id`, go to `takes`. The staging buffer has `staging_bytes`, but room for
    one block in any case. With `pin_memory` it is page-locked and allocated now: to do so later would stall a step.
    """

    def __init__(
        self,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        num_pool_blocks: int,
        host_copy: Callable[..., None],
        *,
        copy_id: int = -2,
        pin_memory: bool,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        super().__init__()
        self._block_shape = torch.Size(block_shape)
        self._dtype = dtype
        self._host_copy = host_copy
        self._copy_id = copy_id
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
        if move_id != self._copy_id:
            return False
        self._copying_on_host = False
        self._error = message
        return True

    def advance(self) -> list[Done]:
        events: list[Done] = []
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
            self._host_copy(self._copy_id, to_host, *staging, tuple(range(len(src))), dst if to_host else src)
            self._copying_on_host = True
        self._hop += 1
        return True

    def _on_device(
        self,
        caches: tuple[Tensor, Tensor],
        staging: list[Tensor],
        ids: Sequence[int],
        to_host: bool,
        *,
        is_reversed: bool,
    ) -> Callable[[], bool]:
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
