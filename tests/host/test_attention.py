"""Results of the host tier: exact over any history, whoever computes them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from omniserve.core.spec import KV_DTYPES, AttentionSpec
from omniserve.ops.attention.base import per_head
from tests.events import ATTENTION_DONE, kind_of
from tests.host.helpers import (
    ATTENTION,
    BLOCK_SIZE,
    KINDS,
    Driver,
    anywhere,
    collect,
    cpu_ticks,
    host_threads,
    make_spec,
    reference,
)
from tests.ops.checks import CPU


@pytest.mark.parametrize(
    ("place", "dtype", "kv_dtype", "block_size", "num_heads", "num_kv_heads", "head_size"),
    [
        ("here", torch.float32, "auto", BLOCK_SIZE, 4, 4, 16),
        ("network", torch.float32, "auto", 5, 6, 2, 64),
        ("here", torch.bfloat16, "auto", BLOCK_SIZE, 8, 1, 64),
        ("network", torch.bfloat16, "auto", 32, 9, 3, 80),
        ("here", torch.bfloat16, "auto", 7, 4, 2, 32),
        ("network", torch.bfloat16, "auto", 1, 4, 2, 32),
        ("here", torch.float16, "auto", BLOCK_SIZE, 4, 2, 32),
        ("network", torch.float16, "auto", 9, 4, 2, 80),
        ("here", torch.float32, "int8", BLOCK_SIZE, 4, 2, 32),
        ("network", torch.bfloat16, "int8", 7, 4, 2, 64),
        ("here", torch.float16, "int8", 32, 4, 2, 80),
    ],
)
def test_random_histories_match_the_reference(
    open_driver: Callable[..., Driver],
    dtype: torch.dtype,
    kv_dtype: str,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
) -> None:
    attention = ATTENTION + (KINDS if num_heads == 4 else ())
    spec = make_spec(dtype, num_heads, num_kv_heads, head_size, attention)
    num_blocks = 2000 // block_size + 100
    driver = open_driver(
        spec, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size, num_blocks=num_blocks, num_slots=6
    )
    choose = random.Random(0)
    for slot, context_len in enumerate((0, 1, max(2, block_size - 1), 127, 300, 1000)):
        driver.start(slot, context_len)
    num_tokens = block_size + 2  # every request comes into a new block
    for token in range(num_tokens):
        for layer in range(spec.num_layers):
            seats = [0, 1, 2, 3, 4, 5, -1, -1]
            choose.shuffle(seats)
            for part in (seats[:3], seats[3:]):
                driver.submit(layer, part)
            for event in collect(driver.tier, 6):
                assert event.layer == layer
                driver.check(event)
        if token == num_tokens // 2:  # a slot changes hands
            driver.release(4)
            driver.start(4, 77)
        for slot in range(6):
            driver.begin(slot)
    assert not driver.expected


@anywhere
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_cpu_attentions_to_the_bit(
    open_driver: Callable[..., Driver], dtype: torch.dtype, kv_dtype: str
) -> None:
    spec = make_spec(dtype, attention=ATTENTION + KINDS)
    driver = open_driver(spec, dtype=dtype, kv_dtype=kv_dtype, num_slots=3)
    lengths = (5, 129, 1500)
    for slot, length in enumerate(lengths):
        driver.start(slot, length)
    width = max(len(blocks) for blocks in driver.blocks.values())
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in driver.blocks.values()], dtype=torch.int32)
    for layer, attention in enumerate(spec.attention):
        q, k, v = driver.random(3, 4, 16), driver.random(3, 2, 16), driver.random(3, 2, 16)
        driver.tier.submit(layer, torch.arange(3), q, k, v)
        collect(driver.tier, 3)
        other = torch.ops.omniserve.cpu_attention(
            q,
            driver.tier.pool_LBK2SH[layer],
            None if driver.tier.scales_LBK2S is None else driver.tier.scales_LBK2S[layer],
            table,
            torch.tensor(lengths, dtype=torch.int32) + 1,
            attention.scale,
            attention.window,
            attention.softcap,
            1,
            attention.chunk,
            per_head(attention.sinks, CPU),
            per_head(attention.alibi_slopes, CPU),
        )
        assert torch.equal(driver.tier.results_SD, other.flatten(1))


def test_int8_attention_errs_no_more_than_its_rounding_explains(open_driver: Callable[..., Driver]) -> None:
    """A key off by s/2 per element moves its score by at most e = scale * sum|q| * s/2, so a weight by exp(2e)."""
    attention = AttentionSpec(scale=0.1)
    spec = make_spec(num_heads=4, num_kv_heads=2, head_size=64, attention=(attention,))
    driver = open_driver(spec, kv_dtype="int8", num_slots=1)
    driver.start(0, 500)
    q_NH, k, v = driver.random(4, 64), driver.random(1, 2, 64), driver.random(1, 2, 64)
    driver.tier.submit(0, torch.tensor([0]), q_NH[None], k, v)
    collect(driver.tier, 1)
    k_TKH, v_TKH = (torch.cat(pair) for pair in zip(driver.history[0][0], (k, v), strict=True))
    half_step = [rows.abs().amax(-1).max().item() / 127 / 2 for rows in (k_TKH, v_TKH)]
    score_error = attention.scale * q_NH.abs().sum(-1).max().item() * half_step[0]
    bound = math.expm1(2 * score_error) * v_TKH.abs().max().item() + half_step[1]
    error = (driver.tier.results_SD[0] - reference(q_NH, k_TKH, v_TKH, attention)).abs().max().item()
    assert 0 < error < bound < 1  # of values up to 4
    assert error < 0.02, "errors of 500 tokens mostly cancel out"


@anywhere
def test_one_long_and_many_short_requests_share_the_threads(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=1200, num_slots=32, num_threads=3)
    driver.start(0, 12_000)
    for slot in range(1, 32):
        driver.start(slot, 3 * slot)
    for layer in range(3):
        driver.submit(layer, range(32))
        for event in collect(driver.tier, 32):
            driver.check(event)
    stats = driver.tier.stats()
    assert stats.tasks_done == 3 * 32 and stats.failures == 0 and stats.tasks_in_hand == 0
    tokens = [slot * 3 + 1 for slot in range(1, 32)] + [12_001]
    assert stats.kv_bytes_read >= 2 * sum(tokens) * 2 * 16 * 4 * 2  # two of three layers see everything
    assert stats.busy_seconds > 0


def test_a_single_long_request_uses_all_threads(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=1100, num_slots=1, num_threads=2)
    driver.start(0, 16_000)
    rows = driver.random(1, 4, 16), driver.random(1, 2, 16), driver.random(1, 2, 16)
    threads = host_threads()
    assert len(threads) == 2
    for _ in range(20_000):  # as long as it takes; it takes 100 or so
        driver.tier.submit(0, torch.tensor([0]), *rows)
        collect(driver.tier, 1)
        if min(map(cpu_ticks, threads)) >= 3:
            return
    pytest.fail(f"the threads' CPU time is {[cpu_ticks(task) for task in threads]} ticks")


def test_bad_arguments_are_refused_and_leave_nothing_queued(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=4, num_slots=2)
    tier = driver.tier
    for arguments, message in (
        ((2, 0, 0, [0]), r"slot must be in \[0, 2\), got 2"),
        ((-1, 0, 0, [0]), r"slot must be in \[0, 2\), got -1"),
        ((0, -1, 0, [0]), "epoch must be >= 0"),
        ((0, 0, -1, [0]), "position must be >= 0"),
        ((0, 0, 16, [0]), "position 16 needs 2 blocks of 16 tokens, got 1"),
        ((0, 0, 0, [4]), r"block ids must be in \[0, 4\), got 4"),
        ((0, 0, 0, [-1]), r"block ids must be in \[0, 4\), got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            tier.begin_token(*arguments)
    q, k = driver.random(2, 4, 16), driver.random(2, 2, 16)
    one = (q[:1], k[:1], k[:1])
    with pytest.raises(ValueError, match="slot 0 holds no token: call begin_token"):
        tier.submit(0, torch.tensor([0]), *one)
    tier.begin_token(0, 1, 0, (3,))
    with pytest.raises(ValueError, match=r"layer must be in \[0, 3\), got 3"):
        tier.submit(3, torch.tensor([0]), *one)
    with pytest.raises(ValueError, match="slot 0 has 2 seats for 1 token"):
        tier.submit(0, torch.tensor([0, 0]), q, k, k)
    with pytest.raises(ValueError, match="slot 1 holds no token"):
        tier.submit(0, torch.tensor([0, 1]), q, k, k)
    for tensors, message in (
        ((torch.tensor([0, -1]), *one), r"q must be \[2, 4, 16\], got \[1, 4, 16\]"),
        ((torch.tensor([0]), q[:1], q[:1], k[:1]), r"k must be \[1, 2, 16\]"),
        ((torch.tensor([0]), q[:1].half(), k[:1], k[:1]), "q must have the model's dtype, got Half"),
        ((torch.tensor([0], dtype=torch.int32), *one), "slots must be Long, got Int"),
        ((torch.tensor([0]), q[:1], k[:1], k.repeat(1, 1, 2)[:1, :, ::2]), "v must be contiguous in its last"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tier.submit(0, *tensors)
    tier.submit(0, torch.tensor([0, -1]), q, k, k)
    with pytest.raises(ValueError, match="slot 0 has a task in flight: poll"):
        tier.submit(0, torch.tensor([0]), *one)
    with pytest.raises(ValueError, match="slot 0 has a task in flight: poll"):
        tier.begin_token(0, 2, 0, [0])
    (event,) = collect(tier, 1)
    assert (kind_of(event), event.slot, event.epoch) == (ATTENTION_DONE, 0, 1)
    tier.submit(0, torch.tensor([-1, -1]), q, k, k)
    assert not tier.busy and tier.poll() == []
