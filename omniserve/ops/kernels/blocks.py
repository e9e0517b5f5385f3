"""Kernel that copies whole blocks between the device's KV cache and the host pool, in the pool's own layout.

The pool is page-locked memory, which the kernel reads and writes where it lies: one pass over the bus, 16 bytes a
thread, in runs of 512 bytes a warp, and no staging. Few programs are enough to fill the bus, and leave the rest of the
device to the step that runs meanwhile.

Legend: L layers, B blocks, K KV heads, S block size, H head size, M blocks that are copied. A plane is one block's K or
V of one layer and KV head, ``[S, H]``; V of a bf16 pool with an even S is in token pairs, ``[S/2, H, 2]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 32
"""Programs of a copy. Each has 8 KiB in flight; the bus (PCIe 5.0 x16: about 50 GB/s, 2 us) holds some 100 KiB."""

_TILE_BYTES = 4096  # of K, and as much of V: 256 threads, a 16-byte vector of each to a thread
_NUM_WARPS = 8
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit(  # not compiled anew for what varies between moves
    debug=True,
    do_not_specialize=["num_units", "num_copied", "device_blocks", "pool_blocks"],
    do_not_specialize_on_alignment=["device_ids", "pool_ids"],
)
def _copy_blocks_kernel(
    k: tl.tensor,
    v: tl.tensor,
    pool: tl.tensor,
    pool_v: tl.tensor,
    device_ids: tl.tensor,
    pool_ids: tl.tensor,
    num_units: tl.tensor,
    num_copied: tl.tensor,
    device_blocks: tl.tensor,
    pool_blocks: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
    TO_HOST: tl.constexpr,
    REVERSED: tl.constexpr,
    PAIRED: tl.constexpr,
) -> None:
    # A unit is a tile of a K plane and of the V plane behind it. Units are in the order of the pool's memory.
    CHUNKS: tl.constexpr = (S * H + TILE - 1) // TILE
    unit = tl.program_id(0)
    while unit < num_units:
        chunk, head = unit % CHUNKS, unit // CHUNKS % K
        copied, layer = unit // (CHUNKS * K) % num_copied, unit // (CHUNKS * K) // num_copied
        device_id, pool_id = tl.load(device_ids + copied), tl.load(pool_ids + copied)
        tl.device_assert((device_id >= 0) & (device_id < device_blocks), "copy_blocks: device_ids are out of range")
        tl.device_assert((pool_id >= 0) & (pool_id < pool_blocks), "copy_blocks: pool_ids are out of range")
        device_plane = ((layer.to(tl.int64) * device_blocks + device_id) * K + head) * (S * H)
        k_plane = ((layer.to(tl.int64) * pool_blocks + pool_id) * K + head) * (2 * S * H)
        v_plane = k_plane + S * H

        i = chunk * TILE + tl.arange(0, TILE)
        inside = i < S * H
        row = S - 1 - i // H if REVERSED else i // H
        place = device_plane + row * H + i % H
        if PAIRED:
            # A word is one column of a pair of tokens: the first in its low half. pool_v counts in words.
            w = chunk * (TILE // 2) + tl.arange(0, TILE // 2)
            has_word = w < S * H // 2
            first_row = S - 1 - w // H * 2 if REVERSED else w // H * 2
            first = device_plane + first_row * H + w % H
            second = first - H if REVERSED else first + H
            word_place = v_plane // 2 + w
            if TO_HOST:
                keys = tl.load(k + place, mask=inside)
                low = tl.load(v + first, mask=has_word).to(tl.int32) & 0xFFFF
                high = tl.load(v + second, mask=has_word).to(tl.int32)
                tl.store(pool + (k_plane + i), keys, mask=inside)
                tl.store(pool_v + word_place, low | (high << 16), mask=has_word)
            else:
                keys = tl.load(pool + (k_plane + i), mask=inside)
                words = tl.load(pool_v + word_place, mask=has_word)
                tl.store(k + place, keys, mask=inside)
                tl.store(v + first, words.to(tl.int16), mask=has_word)
                tl.store(v + second, (words >> 16).to(tl.int16), mask=has_word)
        elif TO_HOST:
            keys, values = tl.load(k + place, mask=inside), tl.load(v + place, mask=inside)
            tl.store(pool + (k_plane + i), keys, mask=inside)
            tl.store(pool_v + (v_plane + i), values, mask=inside)
        else:
            keys = tl.load(pool + (k_plane + i), mask=inside)
            values = tl.load(pool_v + (v_plane + i), mask=inside)
            tl.store(k + place, keys, mask=inside)
            tl.store(v + place, values, mask=inside)
        unit += tl.num_programs(0)


def copy_blocks(
    k_LBKSH: Tensor,
    v_LBKSH: Tensor,
    pool_LBK2SH: Tensor,
    device_ids_M: Tensor,
    pool_ids_M: Tensor,
    *,
    to_host: bool,
    is_reversed: bool,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Copy blocks exactly, K and V of all layers, in one launch on the current stream, for which this does not wait.

    The pool is in pinned memory and has the cache's dtype; all tensors are contiguous. The ids are int64 on the device;
    no target may come twice, and an id out of range is a device-side assertion. With ``is_reversed`` the cache's blocks
    run from the right, which the pool's never do (bros 6). ``num_programs`` is the most programs that run at a time,
    each on a multiprocessor of its own.

    Raises:
        ValueError: The tensors do not fit each other, or have another layout.
    Paper: omniserve 3.2.4 (swapping without interrupting the step).
    """
    layers, device_blocks, kv_heads, block_size, head_size = k_LBKSH.shape
    pool_blocks, num_copied = pool_LBK2SH.shape[1], len(device_ids_M)
    pool_shape = (layers, pool_blocks, kv_heads, 2, block_size, head_size)
    for name, tensor, shape, dtype in (
        ("k_LBKSH", k_LBKSH, k_LBKSH.shape, k_LBKSH.dtype),
        ("v_LBKSH", v_LBKSH, k_LBKSH.shape, k_LBKSH.dtype),
        ("pool_LBK2SH", pool_LBK2SH, pool_shape, k_LBKSH.dtype),
        ("device_ids_M", device_ids_M, (num_copied,), torch.int64),
        ("pool_ids_M", pool_ids_M, (num_copied,), torch.int64),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} of shape {list(shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
            )
    is_paired = k_LBKSH.dtype == torch.bfloat16 and block_size % 2 == 0  # as host_layout in csrc/attention.h
    bits = _BITS[k_LBKSH.itemsize]
    tile = min(triton.next_power_of_2(block_size * head_size), _TILE_BYTES // k_LBKSH.itemsize)
    num_units = layers * num_copied * kv_heads * triton.cdiv(block_size * head_size, tile)
    if not num_units:
        return
    k, v, pool = (tensor.view(-1).view(bits) for tensor in (k_LBKSH, v_LBKSH, pool_LBK2SH))
    with torch.cuda.device_of(k_LBKSH):
        _copy_blocks_kernel[(min(num_programs, num_units),)](
            k,
            v,
            pool,
            pool.view(torch.int32) if is_paired else pool,
            device_ids_M,
            pool_ids_M,
            num_units,
            num_copied,
            device_blocks,
            pool_blocks,
            K=kv_heads,
            S=block_size,
            H=head_size,
            TILE=tile,
            TO_HOST=to_host,
            REVERSED=is_reversed,
            PAIRED=is_paired,
            num_warps=_NUM_WARPS,
            sanitize_overflow=False,
        )
