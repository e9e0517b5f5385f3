"""All block moves of a host tier: which mover copies each one, and what it keeps alive until its event.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from omniserve.core.plan import HostEvent, KVMove, MoveDirection
from omniserve.host.direct import DirectMover
from omniserve.host.mover import Mover, sides
from omniserve.host.staging import StagedMover


class HostMoves:
    """Starts moves between a device cache and the pool.

    The worker threads copy to and from CPU caches, and tell the tier themselves; a mover does so for CUDA ones.

    Args:
        pool_LBK2SH: The host pool.
        dtype: Of the device's cache; the pool's, or the pool is int8.
        host_copy: ``(move_id, to_host, k, v, cache_ids, pool_ids, is_reversed=False)`` lets the worker threads copy
            blocks between a CPU cache and the pool. It must not keep the tier alive.
        pin_memory: The device is a GPU: what the moves need there is got now, not in the first step that needs it.
    """

    def __init__(
        self, pool_LBK2SH: Tensor, dtype: torch.dtype, host_copy: Callable[..., None], *, pin_memory: bool
    ) -> None:
        num_layers, self._num_pool_blocks, num_kv_heads, _, block_size, head_size = pool_LBK2SH.shape
        self._block_shape = (num_layers, num_kv_heads, block_size, head_size)
        self._dtype = dtype
        self._host_copy = host_copy
        self.mover: Mover
        """What moves to and from CUDA caches."""
        if pin_memory and pool_LBK2SH.dtype == dtype:
            self.mover = DirectMover(pool_LBK2SH)
        else:
            self.mover = StagedMover(self._block_shape, dtype, self._num_pool_blocks, host_copy, pin_memory=pin_memory)
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}  # what is copied from or to must stay alive

    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Start a move; see `HostTier.start_move`."""
        self._check(move, device_k_LBKSH, device_v_LBKSH)
        if device_k_LBKSH.device.type == "cpu":
            to_host = move.direction is MoveDirection.TO_HOST
            caches = (device_k_LBKSH, device_v_LBKSH)
            self._host_copy(move.move_id, to_host, *caches, *sides(move), move.is_reversed)
        else:
            self.mover.start(move, device_k_LBKSH, device_v_LBKSH)
        self._caches[move.move_id] = (device_k_LBKSH, device_v_LBKSH)

    def end(self, event: HostEvent) -> None:
        """Let go of a move's caches: the event says that it is over."""
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
