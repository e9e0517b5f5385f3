"""HostMoves: checks each block move of a host tier and gives it to the threads or the mover that copies it.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from omniserve.core.spec import SCALE_BYTES
from omniserve.core.work import HOST_BLOCKS, Done, KVMove, MoveDirection
from omniserve.host.mover import DirectMover, Mover, StagedMover, sides

# Move ids of the worker threads' copies for movers; move ids of callers are >= 0, and -1 means none.
_COPY_ID, _NETWORK_COPY_ID = -2, -3


class HostMoves:
    """Starts moves between a device cache of `dtype` and the pool, which is of the same dtype or int8.

    With `has_int8_caches` both are of int8, and the cache, on the CPU, is laid out as in ``kv/storage.py``.

    The worker threads copy from and to CPU caches and report the end to the tier; a mover does both for CUDA caches.
    ``host_copy(move_id, to_host, k, v, cache_ids, pool_ids, is_reversed=False)`` lets the worker threads copy blocks
    between a CPU cache and the pool; it must not keep the tier alive. With `pin_memory` the device is a GPU, on which
    the mover allocates and compiles all it needs now, not in the first step with a move.
    """

    def __init__(
        self,
        pool_LBK2SH: Tensor,
        dtype: torch.dtype,
        host_copy: Callable[..., None],
        *,
        pin_memory: bool,
        has_int8_caches: bool = False,
    ) -> None:
        num_layers, self._num_pool_blocks, num_kv_heads, _, block_size, head_size = pool_LBK2SH.shape
        row_size = head_size + SCALE_BYTES if has_int8_caches else head_size
        self._block_shape = (num_layers, num_kv_heads, block_size, row_size)
        self._dtype = torch.int8 if has_int8_caches else dtype
        self._host_copy = host_copy
        self._pin_memory = pin_memory
        self.mover: Mover
        """Copies between CUDA caches and the pool."""
        if pin_memory and pool_LBK2SH.dtype == dtype:
            self.mover = DirectMover(pool_LBK2SH)
        else:
            self.mover = self._staged(_COPY_ID, pin_memory=pin_memory)
        self._network_mover = self._staged(_NETWORK_COPY_ID, pin_memory=False)
        """Copies between CUDA caches and hosts on the network."""
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}  # of the moves under way: they must stay alive

    def _staged(self, copy_id: int, *, pin_memory: bool) -> StagedMover:
        return StagedMover(
            self._block_shape,
            self._dtype,
            self._num_pool_blocks,
            self._host_copy,
            copy_id=copy_id,
            pin_memory=pin_memory,
        )

    def allow_network(self) -> None:
        """Make what moves between a GPU and hosts on the network need, before the first of them."""
        if self._pin_memory:
            self._network_mover = self._staged(_NETWORK_COPY_ID, pin_memory=True)

    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Start a move; see `HostTier.start_move`."""
        self._check(move, device_k_LBKSH, device_v_LBKSH)
        if device_k_LBKSH.device.type == "cpu":
            to_host, ids = move.direction is MoveDirection.TO_HOST, sides(move)
            self._host_copy(move.move_id, to_host, device_k_LBKSH, device_v_LBKSH, *ids, move.is_reversed)
        else:
            mover = self._network_mover if _is_on_network(move) else self.mover
            mover.start(move, device_k_LBKSH, device_v_LBKSH)
        self._caches[move.move_id] = (device_k_LBKSH, device_v_LBKSH)

    def end(self, event: Done) -> None:
        """Release the caches of the move that an event says is over."""
        self._caches.pop(event.move_id, None)

    def takes(self, move_id: int, message: str) -> bool:
        """Tell whether an event of the worker threads is about a copy that a mover asked for, and note it then."""
        return self.mover.takes(move_id, message) or self._network_mover.takes(move_id, message)

    def advance(self) -> list[Done]:
        """Start the copies of the movers that can start, and return the events of the moves that are over."""
        return self.mover.advance() + self._network_mover.advance()

    def close(self) -> None:
        """Let moves of the movers fail that are started from now on; the caller waits for the device."""
        self.mover.close()
        self._network_mover.close()

    @property
    def busy(self) -> bool:
        """True while there are moves of the movers without their event."""
        return self.mover.busy or self._network_mover.busy

    @property
    def can_advance(self) -> bool:
        """True when ``advance`` has something to do."""
        return self.mover.can_advance or self._network_mover.can_advance

    @property
    def num_moves(self) -> int:
        """The moves of the movers without their event, but those that the worker threads copy and so count."""
        return self.mover.num_moves + self._network_mover.num_moves

    @property
    def num_failures(self) -> int:
        """Moves that failed on the device."""
        return self.mover.num_failures + self._network_mover.num_failures

    @property
    def bytes_moved(self) -> int:
        """Bytes of finished moves that were copied without the worker threads."""
        return self.mover.bytes_moved + self._network_mover.bytes_moved

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
        device_ids, host_ids = sides(move)
        checked = [(device_ids, device_k_LBKSH.shape[1])]
        if not _is_on_network(move):  # the tier checks blocks of other hosts
            checked.append((host_ids, self._num_pool_blocks))
        for ids, num_blocks in checked:
            if ids and not (0 <= min(ids) and max(ids) < num_blocks):
                raise ValueError(f"block ids must be in [0, {num_blocks}), got {min(ids)} to {max(ids)}")


def _is_on_network(move: KVMove) -> bool:
    _, host_ids = sides(move)
    return bool(host_ids) and host_ids[0] >= HOST_BLOCKS
