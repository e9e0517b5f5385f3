"""HostMoves: checks each block move of a host tier and gives it to the threads or the mover that copies it.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from omniserve.core.plan import HostEvent, KVMove, MoveDirection
from omniserve.host.mover import DirectMover, Mover, StagedMover, sides


class HostMoves:
    """Starts moves between a device cache of `dtype` and the pool, which is of the same dtype or int8.

    The worker threads copy from and to CPU caches and report the end to the tier; a mover does both for CUDA caches.
    ``host_copy(move_id, to_host, k, v, cache_ids, pool_ids, is_reversed=False)`` lets the worker threads copy blocks
    between a CPU cache and the pool; it must not keep the tier alive. With `pin_memory` the device is a GPU, on which
    the mover allocates and compiles all it needs now, not in the first step with a move.
    """

    def __init__(
        self, pool_LBK2SH: Tensor, dtype: torch.dtype, host_copy: Callable[..., None], *, pin_memory: bool
    ) -> None:
        num_layers, self._num_pool_blocks, num_kv_heads, _, block_size, head_size = pool_LBK2SH.shape
        self._block_shape = (num_layers, num_kv_heads, block_size, head_size)
        self._dtype = dtype
        self._host_copy = host_copy
        self.mover: Mover
        """Copies from and to CUDA caches."""
        if pin_memory and pool_LBK2SH.dtype == dtype:
            self.mover = DirectMover(pool_LBK2SH)
        else:
            self.mover = StagedMover(self._block_shape, dtype, self._num_pool_blocks, host_copy, pin_memory=pin_memory)
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}  # of the moves under way: they must stay alive

    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Start a move; see `HostTier.start_move`."""
        self._check(move, device_k_LBKSH, device_v_LBKSH)
        if device_k_LBKSH.device.type == "cpu":
            to_host, ids = move.direction is MoveDirection.TO_HOST, sides(move)
            self._host_copy(move.move_id, to_host, device_k_LBKSH, device_v_LBKSH, *ids, move.is_reversed)
        else:
            self.mover.start(move, device_k_LBKSH, device_v_LBKSH)
        self._caches[move.move_id] = (device_k_LBKSH, device_v_LBKSH)

    def end(self, event: HostEvent) -> None:
        """Release the caches of the move that an event says is over."""
        self._caches.pop(event.move_id, None)

    def _check(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Raise ValueError unless a move's id is free, its blocks exist and its device cache fits the pool."""
        if move.move_id < 0 or move.move_id in self._caches:
            raise ValueError(f"move_id must be >= 0 and not in use, got {move.move_id}")
        num_layers, *row_shape = self._block_shape
        for name, cache in (("device_k_LBKSH", device_k_LBKSH), ("device_v_LBKSH", device_v_LBKSH)):
            fits = cache.dim() == 5 and cache.dtype == self._dtype and cache.is_contiguous()
            if not fits or cache.shape[0] != num_layers or list(cache.shape[2:]) != row_shape:
                raise ValueError(
                    f"{name} must be contiguous {self._dtype} of shape {[num_layers, 'blocks', *row_shape]}, "
                    f"got {cache.dtype} {list(cache.shape)} with strides {cache.stride()}"
                )
        if device_v_LBKSH.shape != device_k_LBKSH.shape:
            raise ValueError(f"K and V differ in shape: {list(device_k_LBKSH.shape)}, {list(device_v_LBKSH.shape)}")
        if len(move.src_block_ids) != len(move.dst_block_ids):
            raise ValueError(f"a move needs as many targets as sources: {move}")
        for ids, num_blocks in zip(sides(move), (device_k_LBKSH.shape[1], self._num_pool_blocks), strict=True):
            if ids and not (0 <= min(ids) and max(ids) < num_blocks):
                raise ValueError(f"block ids must be in [0, {num_blocks}), got {min(ids)} to {max(ids)}")
