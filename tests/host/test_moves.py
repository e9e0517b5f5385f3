"""Moves between the tiers are exact to the bit, touch nothing else, and share the threads with attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omniserve.core.work import AttentionResult, Done, KVMove, MoveDirection
from omniserve.host.mover import DirectMover, StagedMover
from omniserve.host.tier import HostTier
from tests.events import WORK_DONE, WORK_FAILED, kind_of
from tests.host.helpers import (
    BLOCK_SIZE,
    Driver,
    anywhere,
    assert_same_bits,
    collect,
    make_spec,
    make_tier,
    read_pool,
    rounded,
    write_blocks,
)
from tests.ops.host_layout import parts_of_cache, quantize_cache

TO_HOST, TO_DEVICE = MoveDirection.TO_HOST, MoveDirection.TO_DEVICE


def make_move(move_id: int, direction: MoveDirection, src: list[int], dst: list[int]) -> KVMove:
    return KVMove(
        request_id=f"r{move_id}",
        move_id=move_id,
        direction=direction,
        src_block_ids=tuple(src),
        dst_block_ids=tuple(dst),
    )


def random_cache(driver: Driver, num_blocks: int) -> Tensor:
    spec = driver.spec
    return driver.random(spec.num_layers, num_blocks, spec.num_kv_heads, driver.block_size, spec.head_size)


@anywhere
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.float32, 16), (torch.float32, 3), (torch.bfloat16, 16), (torch.bfloat16, 5), (torch.float16, 16)],
)
def test_moves_both_ways_while_attention_runs(
    open_driver: Callable[..., Driver], dtype: torch.dtype, block_size: int
) -> None:
    num_blocks = 1800 // block_size + 150
    driver = open_driver(
        make_spec(dtype, head_size=64), dtype=dtype, block_size=block_size, num_blocks=num_blocks, num_slots=4
    )
    tier = driver.tier
    for slot in range(4):
        driver.start(slot, 400)
    device = [random_cache(driver, 150), random_cache(driver, 150)]
    for side in device:
        side[:, 100:] = float("nan")
    outgoing, incoming = [driver.free.pop() for _ in range(50)], [driver.free.pop() for _ in range(50)]
    write_blocks(tier, slice(None), outgoing, random_cache(driver, 50), random_cache(driver, 50))
    device_ids = torch.randperm(100, generator=driver.rng).tolist()[:50]
    expected_device = [side.clone() for side in device]
    expected_host = read_pool(tier)
    arrivals = list(range(100, 150))
    for k_or_v in range(2):
        expected_host[k_or_v][:, incoming] = device[k_or_v][:, device_ids]
        expected_device[k_or_v][:, arrivals] = expected_host[k_or_v][:, outgoing]

    for layer in range(3):
        part = slice(17 * layer, 17 * (layer + 1))
        driver.submit(layer, range(4))
        tier.start_move(make_move(2 * layer, TO_HOST, device_ids[part], incoming[part]), *device)
        tier.start_move(make_move(2 * layer + 1, TO_DEVICE, outgoing[part], arrivals[part]), *device)
        events = collect(tier, 6)
        for event in events:
            if isinstance(event, AttentionResult):
                driver.check(event)
        moves = {(event.move_id, kind_of(event)) for event in events if isinstance(event, Done)}
        assert moves == {(2 * layer, WORK_DONE), (2 * layer + 1, WORK_DONE)}

    offset = 400 % block_size
    for slot in range(4):  # the one place each that attention has written
        block = driver.blocks[slot][-1]
        for layer in range(3):
            expected_host[0][layer, block, :, offset] = driver.history[slot][layer][0][-1]
            expected_host[1][layer, block, :, offset] = driver.history[slot][layer][1][-1]
    for side, expected in zip(read_pool(tier), expected_host, strict=True):
        assert_same_bits(side, expected)
    for side, expected in zip(device, expected_device, strict=True):
        assert_same_bits(side, expected)
    assert tier.stats().bytes_moved == 100 * driver.spec.kv_block_bytes(block_size)
    assert not tier.busy


@anywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moves_to_an_int8_pool_round_and_back_they_do_not(
    open_driver: Callable[..., Driver], dtype: torch.dtype
) -> None:
    driver = open_driver(make_spec(dtype, head_size=64), dtype=dtype, kv_dtype="int8", num_blocks=20)
    tier = driver.tier
    device = [random_cache(driver, 10), random_cache(driver, 10)]
    device[0][0, 0, 0, 0] = 0  # a row that has no scale
    device[1][0, 0, 0, 1, 5] = torch.inf  # and one that cannot be rounded
    tier.start_move(make_move(0, TO_HOST, list(range(10)), list(range(5, 15))), *device)
    assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    back = [torch.zeros_like(side) for side in device]
    tier.start_move(make_move(1, TO_DEVICE, list(range(5, 15)), list(range(10))), *back)
    assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    for side, got, held in zip(device, back, read_pool(tier), strict=True):
        assert torch.equal(got.nan_to_num(99), held[:, 5:15].to(dtype).nan_to_num(99))
        expected = rounded(tier, side)
        torch.testing.assert_close(got, expected.to(dtype), equal_nan=True, rtol=0, atol=0)
        half_step = side.float().abs().amax(-1, keepdim=True) / 254
        error = (held[:, 5:15] - side).abs()
        assert ((error <= half_step * (1 + 6 * 127 / 2**24)) | expected.isnan()).all()
        assert held[:, :5].isnan().all() and held[:, 15:].isnan().all()
    assert back[0][0, 0, 0, 0].eq(0).all()
    assert back[1][0, 0, 0, 1].isnan().all() and back[1].isnan().sum() == driver.spec.head_size


@anywhere
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 3), (torch.bfloat16, 16)])
def test_blocks_that_run_from_the_right_do_not_on_the_host(
    open_driver: Callable[..., Driver], dtype: torch.dtype, block_size: int, kv_dtype: str
) -> None:
    spec = make_spec(dtype, head_size=64)
    driver = open_driver(spec, dtype=dtype, kv_dtype=kv_dtype, num_blocks=20, block_size=block_size)
    tier = driver.tier
    device = [random_cache(driver, 10), random_cache(driver, 10)]
    back = [torch.zeros_like(side) for side in device]
    for move_id, direction, src, cache in ((0, TO_HOST, 0, device), (1, TO_DEVICE, 5, back)):
        ids = list(range(src, src + 10)), list(range(5 - src, 15 - src))
        tier.start_move(dataclasses.replace(make_move(move_id, direction, *ids), is_reversed=True), *cache)
        assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    for side, got, held in zip(device, back, read_pool(tier), strict=True):
        assert torch.equal(held[:, 5:15].to(dtype), rounded(tier, side).flip(3).to(dtype))
        assert torch.equal(got, rounded(tier, side).to(dtype))


@anywhere
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("block_size", [3, 16])
def test_codes_of_an_int8_cache_are_copied_as_they_are(
    open_driver: Callable[..., Driver], block_size: int, is_reversed: bool
) -> None:
    spec = make_spec(torch.bfloat16, head_size=24)
    driver = open_driver(
        spec, dtype=torch.bfloat16, kv_dtype="int8", cache_dtype="int8", num_blocks=20, block_size=block_size
    )
    tier = driver.tier
    device = [quantize_cache(random_cache(driver, 10)) for _ in range(2)]
    codes, scales = parts_of_cache(device[1])
    codes[0, 0, 0, 1], scales[0, 0, 0, 1] = 0, torch.nan
    back = [torch.zeros_like(side) for side in device]
    for move_id, direction, src, cache in ((0, TO_HOST, 0, device), (1, TO_DEVICE, 5, back)):
        ids = list(range(src, src + 10)), list(range(5 - src, 15 - src))
        tier.start_move(dataclasses.replace(make_move(move_id, direction, *ids), is_reversed=is_reversed), *cache)
        assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    pool, pool_scales = tier.pool_LBK2SH[:, 5:15], tier.scales_LBK2S[:, 5:15]
    for side, (got, before) in enumerate(zip(back, device, strict=True)):
        assert torch.equal(got, before)
        codes, scales = (part.flip(3) if is_reversed else part for part in parts_of_cache(before))
        assert torch.equal(pool[:, :, :, side], codes)
        assert_same_bits(pool_scales[:, :, :, side].contiguous(), scales.contiguous())
    assert tier.stats().bytes_moved == 2 * 10 * spec.kv_block_bytes(block_size, "int8")
    with pytest.raises(ValueError, match=r"device_k_LBKSH must be contiguous torch\.int8 of shape"):
        tier.start_move(make_move(2, TO_HOST, [0], [0]), *(random_cache(driver, 1) for _ in range(2)))
    with pytest.raises(ValueError, match="a cache of int8 needs a host pool of int8"):
        open_driver(spec, dtype=torch.bfloat16, cache_dtype="int8")


def test_a_move_goes_ahead_of_queued_attention(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_slots=4, num_threads=1)
    for slot in range(4):
        driver.start(slot, 20)
    device = [random_cache(driver, 40), random_cache(driver, 40)]
    driver.tier.inject(delay_s=0.2)  # keeps the only thread asleep while the rest is queued
    driver.submit(0, [0, 1, 2, 3])
    driver.tier.start_move(make_move(7, TO_HOST, list(range(40)), driver.free[:40]), *device)
    events = collect(driver.tier, 5)
    order = [isinstance(event, Done) for event in events]
    assert order.index(True) <= 1, "more than the task in hand went first"
    for event in events:
        if isinstance(event, AttentionResult):
            driver.check(event)


def test_bad_moves_are_refused(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=10)
    tier = driver.tier
    device = [random_cache(driver, 5), random_cache(driver, 5)]
    for src, dst, message in (
        ([5], [0], r"block ids must be in \[0, 5\), got 5"),
        ([0], [10], r"block ids must be in \[0, 10\), got 10"),
        ([0, -1], [0, 1], r"block ids must be in \[0, 5\), got -1"),
        ([0, 1], [0], "as many targets as sources"),
    ):
        with pytest.raises(ValueError, match=message):
            tier.start_move(make_move(0, TO_HOST, src, dst), *device)
    with pytest.raises(ValueError, match="move_id must be >= 0"):
        tier.start_move(make_move(-1, TO_HOST, [0], [0]), *device)
    for cache in (device[0].half(), device[0][:2], device[0][..., :8], device[0].transpose(2, 3)):
        with pytest.raises(ValueError, match="device_v_LBKSH must be contiguous"):
            tier.start_move(make_move(0, TO_HOST, [0], [0]), device[0], cache)
    tier.start_move(make_move(0, TO_HOST, [], []), *device)
    with pytest.raises(ValueError, match="not in use, got 0"):
        tier.start_move(make_move(0, TO_HOST, [0], [0]), *device)
    assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]


class Staged:
    """A staged mover over a driver's tier, with CPU tensors for the device: the same hops, without a stream."""

    def __init__(self, driver: Driver, staging_blocks: int) -> None:
        tier = driver.tier
        self.tier = tier
        host_copy = functools.partial(torch.ops.omniserve_host.start_move, tier._handle)
        self.mover = StagedMover(
            (driver.spec.num_layers, driver.spec.num_kv_heads, BLOCK_SIZE, driver.spec.head_size),
            tier.results_SD.dtype,
            tier.num_blocks,
            host_copy,
            pin_memory=False,
            staging_bytes=staging_blocks * driver.spec.kv_block_bytes(BLOCK_SIZE),
        )
        tier._moves.mover = self.mover


def test_staged_moves_go_through_the_buffer_in_chunks(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=60)
    staged = Staged(driver, staging_blocks=4)
    tier = driver.tier
    device = [random_cache(driver, 40), random_cache(driver, 40)]
    expected_host = read_pool(tier)
    src, dst = torch.randperm(40).tolist()[:11], torch.randperm(60).tolist()[:11]
    for k_or_v in range(2):
        expected_host[k_or_v][:, dst] = device[k_or_v][:, src]
    staged.mover.start(make_move(0, TO_HOST, src, dst), *device)
    assert tier.busy and not tier.attends
    assert [(kind_of(event), event.move_id) for event in collect(tier, 1)] == [(WORK_DONE, 0)]
    for side, expected in zip(read_pool(tier), expected_host, strict=True):
        assert_same_bits(side, expected)

    back = [torch.full_like(side, float("nan")) for side in device]
    expected = [side.clone() for side in back]
    for k_or_v in range(2):
        expected[k_or_v][:, src] = device[k_or_v][:, src]
    staged.mover.start(make_move(1, TO_DEVICE, dst[:5], src[:5]), *back)  # two in the queue
    staged.mover.start(make_move(2, TO_DEVICE, dst[5:], src[5:]), *back)
    assert [(kind_of(event), event.move_id) for event in collect(tier, 2)] == [(WORK_DONE, 1), (WORK_DONE, 2)]
    for side, wanted in zip(back, expected, strict=True):
        assert_same_bits(side, wanted)
    assert not tier.busy and tier.stats().moves_in_hand == 0


def test_staged_moves_turn_blocks_that_run_from_the_right(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=20)
    staged = Staged(driver, staging_blocks=4)
    device = [random_cache(driver, 10), random_cache(driver, 10)]
    back = [torch.zeros_like(side) for side in device]
    ids = list(range(10))
    for move_id, direction, cache in ((0, TO_HOST, device), (1, TO_DEVICE, back)):
        staged.mover.start(dataclasses.replace(make_move(move_id, direction, ids, ids), is_reversed=True), *cache)
        assert [kind_of(event) for event in collect(driver.tier, 1)] == [WORK_DONE]
    for side, got, held in zip(device, back, read_pool(driver.tier), strict=True):
        assert_same_bits(held[:, :10].contiguous(), side.flip(3))
        assert_same_bits(got, side)


def test_staged_moves_fail_by_one_event_each(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=20, num_threads=1)
    staged = Staged(driver, staging_blocks=4)
    device = [random_cache(driver, 20), random_cache(driver, 20)]
    staged.mover.start(make_move(0, TO_HOST, [99], [0]), *device)  # the device refuses
    driver.tier.inject(kill_threads=1)
    staged.mover.start(make_move(1, TO_HOST, list(range(9)), list(range(9))), *device)  # the last thread dies on it
    staged.mover.start(make_move(2, TO_DEVICE, [0], [0]), *device)  # and nobody is left for this one
    events = collect(driver.tier, 3)
    assert [(kind_of(event), event.move_id) for event in events] == [(WORK_FAILED, i) for i in range(3)]
    assert all(event.message for event in events)
    assert driver.tier.stats().failures == 3 and not driver.tier.busy


def test_closing_fails_staged_moves(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=20)
    staged = Staged(driver, staging_blocks=4)
    device = [random_cache(driver, 20), random_cache(driver, 20)]
    for move_id in range(2):
        staged.mover.start(make_move(move_id, TO_HOST, [0], [0]), *device)
    driver.tier.close()
    assert [kind_of(event) for event in driver.tier.poll()] == [WORK_FAILED] * 2


class Gated(DirectMover):
    """A direct mover of CPU tensors, whose copies are over when their number is in `over`."""

    def __init__(self, tier: HostTier) -> None:
        super().__init__(tier.pool_LBK2SH)
        self.over: set[int] = set()
        self._num_launched = 0
        tier._moves.mover = self

    def _launch(
        self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor, ids_2M: Tensor
    ) -> Callable[[], bool]:
        super()._launch(move, device_k_LBKSH, device_v_LBKSH, ids_2M)
        number = self._num_launched
        self._num_launched += 1
        return lambda: number in self.over


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 5), (torch.float16, 4)]
)
def test_direct_moves_are_exact_both_ways(
    open_driver: Callable[..., Driver], dtype: torch.dtype, block_size: int, is_reversed: bool
) -> None:
    driver = open_driver(make_spec(dtype), dtype=dtype, block_size=block_size, num_blocks=60)
    tier = driver.tier
    tier._moves.mover = DirectMover(tier.pool_LBK2SH)
    device = [random_cache(driver, 40), random_cache(driver, 40)]
    expected_host = read_pool(tier)
    src, dst = torch.randperm(40).tolist()[:11], torch.randperm(60).tolist()[:11]
    back = [torch.full_like(side, float("nan")) for side in device]
    expected = [side.clone() for side in back]
    for k_or_v, side in enumerate(device):
        expected_host[k_or_v][:, dst] = side[:, src].flip(3) if is_reversed else side[:, src]
        expected[k_or_v][:, src] = side[:, src]
    for move_id, (direction, ids, cache) in enumerate(
        ((TO_HOST, (src, dst), device), (TO_DEVICE, (dst, src), back), (TO_HOST, ([], []), device))
    ):
        move = dataclasses.replace(make_move(move_id, direction, *ids), is_reversed=is_reversed)
        tier._moves.mover.start(move, *cache)
        assert [(kind_of(event), event.move_id) for event in collect(tier, 1)] == [(WORK_DONE, move_id)]
    for side, wanted in zip((*read_pool(tier), *back), (*expected_host, *expected), strict=True):
        assert_same_bits(side, wanted)
    assert tier.stats().bytes_moved == 22 * driver.spec.kv_block_bytes(block_size)


def test_direct_moves_are_reported_when_they_are_over_and_in_order(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=20)
    tier, device = driver.tier, [random_cache(driver, 5), random_cache(driver, 5)]
    mover = Gated(tier)
    for move_id in range(3):
        mover.start(make_move(move_id, TO_HOST, [move_id], [move_id]), *device)
    mover.over = {1}  # but not the first
    tier.wait(0.01)
    assert tier.poll() == [] and tier.busy and not tier.attends
    assert tier.stats().moves_in_hand == 3 and tier.stats().bytes_moved == 0
    mover.over = {0, 1}
    assert [(kind_of(event), event.move_id) for event in collect(tier, 2)] == [(WORK_DONE, i) for i in (0, 1)]
    assert tier.stats().moves_in_hand == 1
    mover.over = {0, 1, 2}
    assert [event.move_id for event in collect(tier, 1)] == [2]
    assert not tier.busy


def test_direct_moves_fail_by_one_event_each(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=20)
    tier, device = driver.tier, [random_cache(driver, 5), random_cache(driver, 5)]
    mover = Gated(tier)
    copy_blocks = mover._copy_blocks

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    mover._copy_blocks = out_of_memory
    mover.start(make_move(0, TO_HOST, [0], [0]), *device)
    mover._copy_blocks = copy_blocks
    mover.start(make_move(1, TO_HOST, [1], [1]), *device)
    mover.over = {0}
    tier.close()
    mover.start(make_move(2, TO_HOST, [2], [2]), *device)
    events = collect(tier, 3)
    kinds = [WORK_FAILED, WORK_DONE, WORK_FAILED]
    assert [(event.move_id, kind_of(event)) for event in events] == list(enumerate(kinds))
    assert "no memory" in events[0].message and "closed" in events[2].message
    assert tier.stats().failures == 2 and tier.stats().bytes_moved == driver.spec.kv_block_bytes(BLOCK_SIZE)


@pytest.mark.gpu
def test_cuda_moves_to_an_int8_pool_go_over_the_staging_buffer() -> None:
    spec = make_spec(torch.bfloat16, head_size=64)
    tier = make_tier(spec, dtype=torch.bfloat16, num_blocks=60, pin_memory=True, kv_dtype="int8")
    driver = Driver(tier, spec)
    device = [random_cache(driver, 40).cuda(), random_cache(driver, 40).cuda()]
    tier.start_move(make_move(0, TO_HOST, list(range(40)), list(range(40))), *device)
    assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    assert isinstance(tier._moves.mover, StagedMover)
    for side, held in zip(device, read_pool(tier), strict=True):
        assert torch.equal(held[:, :40], rounded(tier, side.cpu()))
    tier.close()


@pytest.mark.gpu
def test_cuda_moves_are_exact_beside_steps_that_write_the_same_blocks_later() -> None:
    spec = make_spec(torch.bfloat16)
    tier = make_tier(spec, dtype=torch.bfloat16, num_blocks=100, pin_memory=True)
    driver = Driver(tier, spec)
    device = [random_cache(driver, 100).cuda(), random_cache(driver, 100).cuda()]
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        x = x @ x / 4096
    for side in device:  # queued behind a long step, and so not there yet when the move starts
        side += 1
    expected = [side.clone() for side in device]
    ids = list(range(100))
    tier.start_move(make_move(0, TO_HOST, ids, ids[::-1]), *device)
    assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    for side in device:  # free, now that the event has come
        side.zero_()
    for side, held in zip(expected, read_pool(tier), strict=True):
        assert_same_bits(held[:, ids[::-1]].contiguous(), side.cpu())
    tier.close()


@pytest.mark.gpu
def test_cuda_moves_are_exact_in_both_directions() -> None:
    spec = make_spec(torch.bfloat16)
    tier = make_tier(spec, dtype=torch.bfloat16, num_blocks=60, pin_memory=True)
    assert isinstance(tier._moves.mover, DirectMover)
    driver = Driver(tier, spec)
    device = [random_cache(driver, 40).cuda(), random_cache(driver, 40).cuda()]
    back = [torch.full_like(side, float("nan")) for side in device]
    src, dst = torch.randperm(40).tolist()[:30], torch.randperm(60).tolist()[:30]
    tier.start_move(make_move(0, TO_HOST, src, dst), *device)
    assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    tier.start_move(make_move(1, TO_DEVICE, dst, src), *back)
    assert [kind_of(event) for event in collect(tier, 1)] == [WORK_DONE]
    for k_or_v, side in enumerate(back):
        expected = torch.full_like(side, float("nan"))
        expected[:, src] = device[k_or_v][:, src]
        assert_same_bits(side.cpu(), expected.cpu())
    tier.close()
