"""The pool's memory and layout: what goes in comes out, whatever the shape, and touching pages changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniserve.core.spec import KV_DTYPES, AttentionSpec
from omniserve.core.work import KVMove, MoveDirection
from omniserve.host.memory import allocate_pool
from tests.events import WORK_DONE, kind_of
from tests.host.helpers import assert_same_bits, collect, make_spec, make_tier, poison, wait_until
from tests.machines import write_machine
from tests.ops.host_layout import pack_blocks, quantize_blocks, read_blocks

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
    for kv_dtype in KV_DTYPES:
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
            assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
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
            # Half a step, and what float32 rounds of quotients up to 127: three times 127 / 2^24 of a step.
            assert ((side - want).abs() <= want.abs().amax(-1, keepdim=True) / 254 * (1 + 6 * 127 / 2**24)).all()
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


class _CudaRuntime:
    """The functions of CUDA that `allocate_pool` calls."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert ctypes.string_at(address, num_bytes) == bytes(num_bytes), "all pages were touched"
        self.locked[address] = num_bytes
        self.calls += 1
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.locked.pop(address))  # still mapped, or this process ends here
        return 0


@pytest.fixture
def cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> _CudaRuntime:
    runtime = _CudaRuntime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr("torch.cuda.check_error", lambda error: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    return runtime


def test_page_locked_memory_is_as_much_as_asked_for_and_locked_until_its_last_view_is_gone(
    cuda_runtime: _CudaRuntime,
) -> None:
    pool = allocate_pool((3, 1 << 20, 7), torch.bfloat16, pin_memory=True)
    assert cuda_runtime.locked == {pool.data_ptr(): 42 << 20} and pool.data_ptr() % (2 << 20) == 0
    view = pool[1:, 5]
    del pool
    assert cuda_runtime.locked
    view.fill_(1.5)
    del view
    assert not cuda_runtime.locked
    allocate_pool((1,), torch.float32)
    assert cuda_runtime.calls == 1


def test_memory_that_cuda_does_not_lock_is_refused_with_what_to_do(cuda_runtime: _CudaRuntime) -> None:
    cuda_runtime.error = 2
    with pytest.raises(RuntimeError, match=r"cannot page-lock 0\.06 GiB .*error 2.*smaller host_kv_bytes"):
        allocate_pool((1 << 26,), torch.uint8, pin_memory=True)
    assert cuda_runtime.locked, "what was not locked is not unlocked"


@pytest.mark.gpu
def test_cuda_copies_to_and_from_page_locked_memory_beside_the_host() -> None:
    pool = allocate_pool((3, 1000, 77), torch.bfloat16, pin_memory=True)
    assert pool.is_pinned() and pool[2:, 5:].is_pinned()
    source = torch.randn(3, 1000, 77, dtype=torch.bfloat16, device="cuda")
    pool.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(pool, source.cpu())
    assert torch.equal(pool.to("cuda", non_blocking=True), source)


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


def test_a_kernel_that_refuses_to_spread_pages_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The made-up machine has nodes that the kernel does not; in a container it may refuse for any node."""
    monkeypatch.setattr("omniserve.core.numa.SYSTEM", write_machine(tmp_path / "system", {1022: "0", 1023: "1"}))
    monkeypatch.setattr("omniserve.core.numa.STATUS", tmp_path / "status")
    pool = allocate_pool((8 << 20,), torch.uint8, cores=(0, 1))
    assert "pages cannot be interleaved" in caplog.text
    assert pool.fill_(1).sum() == 8 << 20
    caplog.clear()
    allocate_pool((8 << 20,), torch.uint8, cores=(0,))
    assert not caplog.text, "one node"


def test_poison_is_nan_in_every_pool() -> None:
    for kv_dtype in KV_DTYPES:
        tier = make_tier(make_spec(), kv_dtype=kv_dtype, num_blocks=4)
        poison(tier, range(4))
        assert all(side.isnan().all() for side in read_blocks(tier.pool_LBK2SH, tier.scales_LBK2S))
        tier.close()
