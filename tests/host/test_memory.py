"""The pool's memory and layout: what goes in comes out, whatever the shape, and touching pages changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniserve.host.memory import allocate_pool
from omniserve.ops.host_layout import pack_blocks, quantize_blocks, read_blocks
from omniserve.plan import HostEventKind, KVMove, MoveDirection
from omniserve.spec import HOST_KV_DTYPES, AttentionSpec
from tests.host.helpers import assert_same_bits, collect, make_spec, make_tier, poison, wait_until

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    dtype=st.sampled_from(DTYPES),
    block_size=st.integers(1, 34),
    head_size=st.integers(1, 70),
    num_kv_heads=st.integers(1, 3),
    num_layers=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_block_comes_back_as_it_went_in(
    dtype: torch.dtype, block_size: int, head_size: int, num_kv_heads: int, num_layers: int, seed: int
) -> None:
    spec = make_spec(dtype, num_kv_heads, num_kv_heads, head_size, (AttentionSpec(scale=1.0),) * num_layers)
    rng = torch.Generator().manual_seed(seed)
    shape = (num_layers, 4, num_kv_heads, block_size, head_size)
    k, v = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    out, home = torch.randperm(4, generator=rng).tolist(), torch.randperm(6, generator=rng).tolist()[:4]
    for kv_dtype in HOST_KV_DTYPES:
        tier = make_tier(spec, dtype=dtype, block_size=block_size, num_blocks=6, num_threads=1, kv_dtype=kv_dtype)
        back = [torch.zeros_like(k), torch.zeros_like(v)]
        for move_id, (direction, ids, caches) in enumerate(
            [(MoveDirection.TO_HOST, (out, home), (k, v)), (MoveDirection.TO_DEVICE, (home, out), back)]
        ):
            move = KVMove(
                request_id="r",
                move_id=move_id,
                direction=direction,
                src_block_ids=tuple(ids[0]),
                dst_block_ids=tuple(ids[1]),
            )
            tier.start_move(move, *caches)
            assert [event.kind for event in collect(tier, 1)] == [HostEventKind.MOVE_DONE]
        if tier.scales_LBK2S is None:
            assert_same_bits(tier.pool_LBK2SH[:, home], pack_blocks(k, v)[:, out])
            expected = [k, v]
        else:
            values, scales = quantize_blocks(k, v)
            assert_same_bits(tier.pool_LBK2SH[:, home], values[:, out])
            assert_same_bits(tier.scales_LBK2S[:, home], scales[:, out])
            expected = [side.to(dtype) for side in read_blocks(values, scales)]
        for side, want in zip(back, expected, strict=True):
            assert_same_bits(side, want)
        tier.close()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("block_size", [16, 9])
def test_blocks_packed_in_python_read_back(dtype: torch.dtype, block_size: int) -> None:
    k, v = torch.randn(2, 3, 4, block_size, 8), torch.randn(2, 3, 4, block_size, 8)
    if dtype == torch.int8:
        values, scales = quantize_blocks(k, v)
        for side, want in zip(read_blocks(values, scales), (k, v), strict=True):
            assert ((side - want).abs() <= want.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)).all()
    else:
        for side, want in zip(read_blocks(pack_blocks(k.to(dtype), v.to(dtype))), (k, v), strict=True):
            assert torch.equal(side, want.to(dtype))


def test_the_pool_is_touched_beside_the_work_and_keeps_its_contents() -> None:
    spec = make_spec(head_size=64)
    tier = make_tier(spec, num_blocks=1000)
    expected = torch.arange(tier.pool_LBK2SH.numel(), dtype=torch.float32).view(tier.pool_LBK2SH.shape)
    tier.pool_LBK2SH.copy_(expected)
    assert tier.stats().pool_bytes == expected.nbytes > 4 << 20
    wait_until(lambda: tier.stats().bytes_prefaulted == tier.stats().pool_bytes)
    assert torch.equal(tier.pool_LBK2SH, expected)
    assert not tier.busy, "touching is no work that anybody waits for"
    tier.close()


def test_pool_memory_starts_at_a_huge_page() -> None:
    pool = allocate_pool((3, 5, 7), torch.bfloat16)
    assert pool.shape == (3, 5, 7) and pool.dtype == torch.bfloat16 and pool.is_contiguous()
    assert pool.data_ptr() % (2 << 20) == 0
    pool.fill_(1.5)
    assert pool.sum() == 1.5 * pool.numel()


def test_pages_are_spread_over_existing_nodes_only() -> None:
    memory = allocate_pool((8 << 20,), torch.uint8)
    try:
        torch.ops.omniserve_host.interleave(memory, torch.tensor([0]))
    except RuntimeError as error:
        if "not implemented" in str(error):
            pytest.skip("this kernel knows no NUMA nodes")
        raise
    memory.fill_(1)
    for nowhere in (1023, 1024, -1):
        with pytest.raises(RuntimeError, match=r"cannot be interleaved|no NUMA node"):
            torch.ops.omniserve_host.interleave(memory, torch.tensor([nowhere]))


def test_poison_is_nan_in_every_pool() -> None:
    for kv_dtype in HOST_KV_DTYPES:
        tier = make_tier(make_spec(), kv_dtype=kv_dtype, num_blocks=4)
        poison(tier, range(4))
        assert all(side.isnan().all() for side in read_blocks(tier.pool_LBK2SH, tier.scales_LBK2S))
        tier.close()
