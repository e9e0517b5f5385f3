"""The copy between a cache and the host pool is exact to the bit and touches nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.ops.kernels.blocks import copy_blocks
from tests.ops.checks import DTYPES
from tests.ops.host_layout import pack_blocks, read_blocks
from tests.pairwise import pairwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 2


def bits(tensor: Tensor) -> Tensor:
    """NaNs count, and differ."""
    return tensor.cpu().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def noise(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return all kinds of bits."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator)
    return words.to({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


SHAPES = ((16, 2, 16, 5), (5, 3, 24, 32), (2, 1, 5, 1), (1, 2, 8, 3), (18, 1, 80, 2), (16, 1, 256, 4), (33, 1, 128, 3))
"""Block size, KV heads, head size, programs."""


@pytest.mark.parametrize("row", pairwise(shape=SHAPES, dtype=DTYPES, to_host=(True, False), is_reversed=(False, True)))
def test_copies_whole_blocks_and_nothing_else(row: dict[str, Any]) -> None:
    (block_size, kv_heads, head_size, num_programs), dtype, to_host, is_reversed = row.values()
    k, v = (noise(LAYERS, 6, kv_heads, block_size, head_size, dtype=dtype, seed=seed) for seed in (0, 1))
    pool = noise(LAYERS, 9, kv_heads, 2, block_size, head_size, dtype=dtype, seed=2)
    device_ids, pool_ids = [5, 0, 3], [1, 8, 4]
    expected = k.clone(), v.clone(), pool.clone()
    if to_host:
        sides = [side[:, device_ids].flip(3) if is_reversed else side[:, device_ids] for side in (k, v)]
        expected[2][:, pool_ids] = pack_blocks(*sides)
    else:
        for side, blocks in zip(expected, read_blocks(pool[:, pool_ids]), strict=False):
            side[:, device_ids] = blocks.flip(3) if is_reversed else blocks
    on_device = k.to(DEVICE), v.to(DEVICE), pool.pin_memory() if DEVICE.type == "cuda" else pool
    ids = torch.tensor([device_ids, pool_ids], device=DEVICE)
    copy_blocks(*on_device, ids[0], ids[1], to_host=to_host, is_reversed=is_reversed, num_programs=num_programs)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for got, wanted in zip(on_device, expected, strict=True):
        assert torch.equal(bits(got), bits(wanted))


def test_no_block_is_nothing_to_do() -> None:
    k, pool = torch.zeros(1, 2, 1, 4, 8, device=DEVICE), torch.zeros(1, 2, 1, 2, 4, 8)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    copy_blocks(k, k, pool, none, none, to_host=True, is_reversed=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(1, 3, 1, 4, 8)}, "v_LBKSH must be contiguous"),
        ({"pool": torch.zeros(1, 2, 1, 2, 4, 8).half()}, "pool_LBK2SH must be contiguous torch.float32 .* got .*16"),
        ({"pool": torch.zeros(2, 2, 1, 2, 4, 8)}, r"pool_LBK2SH must be .*\[1, 2, 1, 2, 4, 8\], got"),
        ({"k": torch.zeros(1, 2, 1, 4, 16)[..., ::2]}, "k_LBKSH must be contiguous"),
        ({"pool_ids": torch.tensor([0, 1])}, r"pool_ids_M must be .* of shape \[1\]"),
        ({"device_ids": torch.tensor([0], dtype=torch.int32)}, "device_ids_M must be contiguous torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    args = {
        "k": torch.zeros(1, 2, 1, 4, 8),
        "v": torch.zeros(1, 2, 1, 4, 8),
        "pool": torch.zeros(1, 2, 1, 2, 4, 8),
        "device_ids": torch.tensor([0]),
        "pool_ids": torch.tensor([1]),
    }
    with pytest.raises(ValueError, match=message):
        copy_blocks(*(args | change).values(), to_host=True, is_reversed=False)


@pytest.mark.gpu
def test_copies_are_exact_beside_a_matrix_product_both_ways() -> None:
    shape = (8, 40, 8, 16, 128)
    k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    pool = torch.zeros(8, 60, 8, 2, 16, 128, dtype=torch.bfloat16).pin_memory()
    back = [torch.zeros_like(side) for side in (k, v)]
    ids = torch.stack([torch.randperm(40), torch.randperm(60)[:40]]).cuda()
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    expected = x @ x
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = [x @ x for _ in range(20)]
    with torch.cuda.stream(side):
        copy_blocks(k, v, pool, ids[0], ids[1], to_host=True, is_reversed=True)
        copy_blocks(*back, pool, ids[0], ids[1], to_host=False, is_reversed=True)
    results += [x @ x for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)
    for got, wanted, held in zip(back, (k, v), read_blocks(pool[:, ids[1].cpu()]), strict=True):
        assert torch.equal(got, wanted)
        assert torch.equal(held, wanted[:, ids[0]].flip(3).cpu())


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements() -> None:
    shape = (2, 1 << 16, 8, 16, 128)  # 2^31 elements, K and V 4 GiB each
    k, v = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    last = [side[:, -1].normal_().clone() for side in (k, v)]
    pool = torch.zeros(2, 2, 8, 2, 16, 128, dtype=torch.bfloat16).pin_memory()
    ids = torch.tensor([[shape[1] - 1], [1]], device="cuda")
    copy_blocks(k, v, pool, ids[0], ids[1], to_host=True, is_reversed=False)
    torch.cuda.synchronize()
    for held, wanted in zip(read_blocks(pool[:, 1]), last, strict=True):
        assert torch.equal(held, wanted.cpu())
