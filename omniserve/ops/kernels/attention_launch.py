"""Chooses tiles, warps and parts of the keys for a launch of the attention kernel, by shape and by device.

Legend: T packed tokens, N query heads, K KV heads, H head size, S block size, R requests, M blocks per request, P parts
of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

MAX_REGISTERS = 255
"""Registers of a thread, as many as there are. By itself the compiler spills some so that a third program fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The properties of a device on which a launch depends. The defaults are the least of sm_80 and newer."""

    shared_bytes: int = 99 << 10
    """Most shared memory of a program: 99 KiB on sm_86, sm_89 and sm_120, 163 on sm_80, 227 on sm_90 and sm_100."""
    multiprocessors: int = 64
    has_wide_tensor_cores: bool = False
    """The tensor cores read their operands from shared memory, 64 rows at a time, as on sm_90 and sm_100; elsewhere
    they read registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """The tile of rows and keys on which one program works."""

    block_m: int
    """Rows: queries of the group's heads."""
    num_warps: int
    num_stages: int = 5
    """Depth of the pipeline. Triton uses a stage for the look-up in the block table: with 5 stages two tiles of K and V
    are loaded at once, with 3 or 4 only one."""
    key_tile_bytes: int = 16 << 10
    """Most bytes of a tile of K, which is as large as one of V: 16 KiB are 64 keys of 128 bf16."""
    max_head_size: int = 256
    """Most columns: with more, the compiler spills registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The constants of the choice by shape. All are reasoned guesses, none is measured yet. The compiler has confirmed
    the shared memory, and that no register is spilled (``tests/ops/kernel_resources``)."""

    tiles: tuple[Tile, ...]
    """Tiles by block_m. A launch takes the first that holds the mean number of rows per request, else the last."""
    fp32_tiles: tuple[Tile, ...] = (Tile(block_m=16, num_warps=8),)
    """The tiles for fp32, which is multiplied without tensor cores, for exactness. With more rows or fewer warps the
    operands do not fit the registers."""
    wide_head_tile: Tile = Tile(block_m=16, num_warps=8, max_head_size=512)
    """The tile for heads that are wider than any other takes: 16 rows and as many keys nearly fill the shared memory of
    the smallest device."""
    wide_fp32_head_tile: Tile = Tile(block_m=16, num_warps=16, max_head_size=512)
    """The tile for such heads in fp32."""
    max_block_n: int = 64
    """Most keys of a tile, however small the heads: scores are BLOCK_M x BLOCK_N registers."""
    programs_per_multiprocessor: int = 2
    """Keys are split until about this number of decode programs run on each multiprocessor. Two load 128 KiB at a time
    on an H200, where a multiprocessor's share of the bandwidth, 36 GB/s, times 1 us of latency is 36 KiB. Each of them
    takes 72 KiB of shared memory (H of 128), so three would fit; but the number of parts is rounded down to a power of
    two, and each part is written and read again. Tiles of keys are made smaller where two do not fit."""
    chunk_splits: tuple[int, ...] = (8, 1)
    """The numbers of parts that are used with chunks, most first: each one is a kernel to compile."""
    max_splits: int = 64
    """Most parts: their results must fit the registers of one program of the combining kernel."""
    max_split_keys: int = 16384
    """Decodes are split further when the table is wide enough for longer parts: one long context among many short ones
    would otherwise be read by one SM alone, at 1/132 of the bandwidth, while the others are done."""
    max_skew_splits: int = 8
    """The limit of such further splits: each part costs a short request a program that returns at once. Only requests
    with more keys than ``max_split_keys`` have more parts that are not empty, and so written and read."""
    max_partial_bytes: int = 64 << 20
    """Most memory for the parts' results."""


_DECODES = Tile(block_m=16, num_warps=4)
"""tl.dot needs 16 rows; a group of fewer heads leaves rows unused, which costs nothing: the tensor cores are done with
a key tile long before the next has come from memory."""

WIDE = Tuning(
    tiles=(
        _DECODES,
        # Short chunks, and decodes beside chunks: the smallest tile that the tensor cores take. A decode in it is still
        # bound by memory: 64 rows x 64 keys x 128 take one SM of an H200 0.35 us, and the 32 KiB of K and V, at 1/132
        # of 4.8 TB/s, 0.9 us.
        Tile(block_m=64, num_warps=4, max_head_size=128),
        Tile(block_m=64, num_warps=8),
        # Long chunks: two warpgroups share each K and V tile.
        Tile(block_m=128, num_warps=8),
    )
)
"""The choice for tensor cores that read shared memory."""

NARROW = Tuning(
    tiles=(
        _DECODES,
        Tile(block_m=64, num_warps=8, max_head_size=128),
        # Accumulators of 64 x 256 leave a thread no registers for more than half a tile of keys; 128 x 128 spill.
        Tile(block_m=64, num_warps=8, key_tile_bytes=8 << 10),
        Tile(block_m=128, num_warps=8, key_tile_bytes=8 << 10, max_head_size=64),
    )
)
"""The choice for tensor cores with operands in registers."""


def tuning_for(device: Device) -> Tuning:
    """Return the constants for a device."""
    return WIDE if device.has_wide_tensor_cores else NARROW


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The parameters of one launch of the attention kernel, which follow from shapes and the device."""

    grid: tuple[int, int, int]
    """(tiles, KV heads, parts)."""
    tile: Tile
    block_n: int
    """Keys of a tile."""

    full_splits: int
    """Parts that keys are cut into however few they are, at most P: as many as the device is full with."""
    max_split_keys: int
    """Keys of a part, until there would be more than P of them."""

    @property
    def num_splits(self) -> int:
        """P."""
        return self.grid[2]


def shared_bytes(tile: Tile, block_n: int, padded_head: int, itemsize: int, device: Device) -> int:
    """Return a bound of the shared memory that a program takes, in bytes: what Triton has been seen to allocate.

    That is the queries, the weights, each tile of K and V that is on its way and, where the tensor cores read shared
    memory, those that they still read; then what the block table said for these, and 1 KiB for the rest.
    """
    in_flight = max(1, tile.num_stages - 3) + (device.has_wide_tensor_cores and tile.block_m >= 64)
    rows_and_weights = tile.block_m * (padded_head + block_n)
    return (rows_and_weights + 2 * in_flight * block_n * padded_head) * itemsize + 8 * block_n + 1024


def choose_launch(
    *,
    num_tokens: int,
    num_requests: int,
    num_heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    table_width: int,
    itemsize: int,
    one_query_each: bool,
    device: Device,
    tuning: Tuning | None = None,
) -> Launch:
    """Return the launch for these shapes (T, R, N, K, H, S, M) and bytes of an element; ``tuning`` is by default the
    device's.
    """
    tuning = tuning or tuning_for(device)
    group = num_heads // kv_heads
    padded_head = max(16, triton.next_power_of_2(head_size))
    mean_rows = -(-num_tokens // max(1, num_requests)) * group
    tiles, wide = (
        (tuning.tiles, tuning.wide_head_tile) if itemsize < 4 else (tuning.fp32_tiles, tuning.wide_fp32_head_tile)
    )
    tiles = tuple(tile for tile in tiles if tile.max_head_size >= padded_head) or (wide,)
    tile = _tile(tiles, mean_rows, group)
    block_n = max(16, min(tuning.max_block_n, tile.key_tile_bytes // (padded_head * itemsize)))
    if block_size >= 64 and block_size & (block_size - 1) == 0:
        block_n = min(block_n, block_size)  # a tile of keys lies in one block
    tile, block_n = _fit(tile, block_n, padded_head, itemsize, device, tuning)
    num_tiles = num_requests if one_query_each else num_tokens // (tile.block_m // group) + num_requests

    max_keys = table_width * block_size
    target_programs = tuning.programs_per_multiprocessor * device.multiprocessors
    full_splits = splits = target_programs // max(1, num_tiles * kv_heads)
    if num_tokens == num_requests:
        splits = max(splits, min(tuning.max_skew_splits, max_keys // tuning.max_split_keys))
    part_bytes = num_tokens * num_heads * head_size * 4
    splits = min(splits, tuning.max_splits, max_keys // block_n, tuning.max_partial_bytes // max(1, part_bytes))
    num_splits = 1 << max(0, splits.bit_length() - 1)
    if not one_query_each:
        num_splits = next((n for n in tuning.chunk_splits if n <= num_splits), 1)
    return Launch(
        grid=(num_tiles, kv_heads, num_splits),
        tile=tile,
        block_n=block_n,
        full_splits=max(1, min(full_splits, num_splits)),
        max_split_keys=tuning.max_split_keys,
    )


def _tile(tiles: tuple[Tile, ...], mean_rows: int, group: int) -> Tile:
    """Return the smallest tile that holds the mean number of rows, or a larger one for a group larger than any tile."""
    tile = next((tile for tile in tiles if tile.block_m >= mean_rows), tiles[-1])
    return tile if tile.block_m >= group else replace(tile, block_m=triton.next_power_of_2(group), num_warps=8)


def _fit(tile: Tile, block_n: int, padded_head: int, itemsize: int, device: Device, tuning: Tuning) -> tuple[Tile, int]:
    """Return the tile and its keys, made smaller until several programs of decodes, or one of others, fit a device."""

    def takes(tile: Tile, block_n: int) -> int:
        return shared_bytes(tile, block_n, padded_head, itemsize, device)

    together = tuning.programs_per_multiprocessor if tile.block_m == 16 else 1
    while block_n > 16 and takes(tile, block_n) > device.shared_bytes // together:
        block_n //= 2
    if takes(tile, block_n) > device.shared_bytes:
        tile = replace(tile, num_stages=3)
    return tile, block_n
