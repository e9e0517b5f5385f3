"""DirectMover: each move is one kernel that reads or writes the host pool in place (``ops/kernels/blocks.py``).

This takes a pool in the cache's dtype: the kernel converts between the two layouts, but not to int8.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from omniserve.core.plan import HostEvent, KVMove, MoveDirection
from omniserve.host.mover import Mover, end_of, sides
from omniserve.ops.cuda import kernels


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

    def advance(self) -> list[HostEvent]:
        events: list[HostEvent] = []
        while self.can_advance:
            copy: _Copy = self._queue.popleft()
            self.bytes_moved += copy.num_bytes
            events.append(end_of(copy.move, copy.error))
        return events

    def _compile(self) -> None:
        """Compile the kernels of both directions now; otherwise the first moves would stall a step."""
        dtype, shape = self._pool_LBK2SH.dtype, self._pool_LBK2SH.shape[2:]
        pool = torch.empty(1, 1, *shape, dtype=dtype, pin_memory=True)
        device = torch.device("cuda", torch.cuda.current_device())  # `HostTier.of` made the tier's device current
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
                device_k_LBKSH, device_v_LBKSH, self._pool_LBK2SH, device_ids_M, pool_ids_M,
                to_host=to_host, is_reversed=move.is_reversed,
            )  # fmt: skip
            return self._when_done()
