"""How the attention kernel is launched: tiles, warps and parts of the keys, chosen by shape.

Legend: T packed tokens, N query heads, K KV heads, H head size, S block size, R requests, M blocks per request, P parts
of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """How one program works."""

    block_m: int
    """Rows: queries of the group's heads."""
    num_warps: int
    num_stages: int
    """Depth of the pipeline. Triton gives the block table's look-up a level of its own: with 5, two tiles of K and V
    are on their way from memory at once, with 3 or 4 only one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What is chosen by shape. Every constant is a reasoned guess for Hopper, none is measured yet."""

    tiles: tuple[Tile, ...] = (
        # Decodes. tl.dot needs 16 rows; a group of fewer heads leaves rows unused, which costs nothing: the tensor
        # cores are done with a key tile of 32 KiB long before the next has come from memory.
        Tile(block_m=16, num_warps=4, num_stages=5),
        # Short chunks, and decodes beside chunks: the smallest tile that wgmma takes. A decode in it is still bound by
        # memory: 64 rows x 64 keys x 128 take one SM 0.35 us, and the 32 KiB of K and V, at 1/132 of 4.8 TB/s, 0.9 us.
        Tile(block_m=64, num_warps=4, num_stages=5),
        # Long chunks: two warpgroups share each K and V tile.
        Tile(block_m=128, num_warps=8, num_stages=5),
    )
    """In order of block_m: the first that holds a request's mean number of rows is taken, else the last."""
    key_tile_bytes: int = 16 << 10
    """Bytes of a tile of K: 64 keys of 128 bf16. A decode program then takes 108 KiB of shared memory as compiled, so
    two fit an SM, with 128 KiB on their way; an SM's share of the bandwidth, 36 GB/s, times 1 us of latency is 36 KiB.
    """
    max_block_n: int = 128
    """Most keys of a tile, however small the heads: scores are BLOCK_M x BLOCK_N registers."""
    max_fp32_block_m: int = 16
    """fp32 is multiplied without tensor cores, for exactness; with more rows its operands do not fit the registers."""
    target_programs: int = 2 * 132
    """Split until about so many programs run: the two that fit on each of an H200's 132 SMs. Splits are rounded down to
    a power of two, so that all run at once: a third would be a second wave, half of it idle."""
    chunk_splits: tuple[int, ...] = (8, 1)
    """Parts where chunks are among the requests, most first: each number is a kernel to compile."""
    max_splits: int = 64
    """Most parts: their results must fit the registers of one program of the combining kernel."""
    max_split_keys: int = 16384
    """Decodes are split further when the table is wide enough for longer parts: one long context among many short ones
    would otherwise be read by one SM alone, at 1/132 of the bandwidth, while the others are done."""
    max_skew_splits: int = 8
    """But no further than this for that reason: each part costs each short request a program that returns at once. Only
    requests with more keys than ``max_split_keys`` are cut further: parts that are not empty are written and read."""
    max_partial_bytes: int = 64 << 20
    """Most memory for the parts' results."""


HOPPER = Tuning()


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch of the attention kernel: a function of shapes."""

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
    tuning: Tuning = HOPPER,
) -> Launch:
    """Return how to launch for these shapes: T, R, N, K, H, S, M, and bytes of an element."""
    group = num_heads // kv_heads
    padded_head = max(16, triton.next_power_of_2(head_size))
    mean_rows = -(-num_tokens // max(1, num_requests)) * group
    tiles = [t for t in tuning.tiles if itemsize < 4 or t.block_m <= tuning.max_fp32_block_m]
    tile = next((t for t in tiles if t.block_m >= mean_rows), tiles[-1])
    if tile.block_m < group:
        tile = Tile(block_m=triton.next_power_of_2(group), num_warps=8, num_stages=tile.num_stages)
    block_n = max(16, min(tuning.max_block_n, tuning.key_tile_bytes // (padded_head * itemsize)))
    if block_size >= 64 and block_size & (block_size - 1) == 0:
        block_n = min(block_n, block_size)  # a tile of keys lies in one block
    num_tiles = num_requests if one_query_each else num_tokens // (tile.block_m // group) + num_requests

    max_keys = table_width * block_size
    full_splits = splits = tuning.target_programs // max(1, num_tiles * kv_heads)
    if num_tokens == num_requests:
        splits = max(splits, min(tuning.max_skew_splits, max_keys // tuning.max_split_keys))
    part_bytes = num_tokens * num_heads * head_size * 4
    splits = min(
        splits, tuning.max_splits, max_keys // block_n, tuning.max_partial_bytes // max(1, part_bytes)
    )  # fmt: skip
    num_splits = 1 << max(0, splits.bit_length() - 1)
    if not one_query_each:
        num_splits = next((n for n in tuning.chunk_splits if n <= num_splits), 1)
    return Launch(
        grid=(num_tiles, kv_heads, num_splits), tile=tile, block_n=block_n,
        full_splits=max(1, min(full_splits, num_splits)), max_split_keys=tuning.max_split_keys,
    )  # fmt: skip
