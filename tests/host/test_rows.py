"""Tasks of several consecutive tokens: exact over any history, also where tokens are taken back and come again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omniserve.core.spec import KV_DTYPES
from tests.events import ATTENTION_FAILED, kind_of
from tests.host.helpers import (
    ATTENTION,
    BLOCK_SIZE,
    KINDS,
    Driver,
    anywhere,
    anywhere_with_seeds,
    assert_same_bits,
    collect,
    make_spec,
)


@pytest.mark.parametrize(
    ("place", "dtype", "kv_dtype", "block_size", "num_heads", "num_kv_heads", "head_size", "max_rows"),
    [
        ("here", torch.float32, "auto", BLOCK_SIZE, 4, 4, 16, 5),
        ("network", torch.float32, "auto", 5, 6, 2, 64, 3),
        ("here", torch.float32, "auto", 1, 4, 2, 16, 2),
        ("network", torch.bfloat16, "auto", BLOCK_SIZE, 4, 1, 64, 16),
        ("here", torch.bfloat16, "auto", 32, 9, 3, 80, 4),
        ("network", torch.bfloat16, "auto", 6, 4, 2, 32, 9),
        ("here", torch.bfloat16, "auto", 7, 4, 2, 32, 4),
        ("network", torch.float16, "auto", 9, 4, 2, 80, 4),
        ("network", torch.bfloat16, "int8", 7, 4, 2, 64, 4),
        ("here", torch.float16, "int8", 32, 4, 2, 80, 8),
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
    max_rows: int,
) -> None:
    attention = ATTENTION + (KINDS if num_heads == 4 else ())
    spec = make_spec(dtype, num_heads, num_kv_heads, head_size, attention)
    # The edges of pieces, where the length of a piece changes, and of KINDS' chunks come within the first tokens.
    lengths = (0, 1, 125, 297, 510, 2046)
    driver = open_driver(
        spec, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size, num_blocks=4500 // block_size + 100,
        num_slots=len(lengths), max_rows=max_rows,
    )  # fmt: skip
    choose = random.Random(0)
    for slot, length in enumerate(lengths):
        driver.start(slot, length, choose.randint(1, max_rows))
    for _ in range(4):
        for layer in choose.sample(range(spec.num_layers), spec.num_layers):
            seats = [*range(len(lengths)), -1, -1]
            choose.shuffle(seats)
            for slot in range(len(lengths)):
                if choose.random() < 0.2:
                    driver.give_up(slot, choose.randrange(driver.num_rows[slot]))
            for part in (seats[:3], seats[3:]):
                driver.submit(layer, part)
            for event in collect(driver.tier, len(lengths)):
                assert event.layer == layer
                driver.check(event)
        for slot in range(len(lengths)):
            driver.take_back(slot, choose.randrange(driver.num_rows[slot]))
            driver.begin(slot, choose.randint(1, max_rows))
    assert not driver.expected


@anywhere
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_beside_others_is_its_own_tasks_to_the_bit(
    open_driver: Callable[..., Driver], dtype: torch.dtype, kv_dtype: str
) -> None:
    """Rows are computed with vectors, which serve blocks of 16, and where all rows are cut into pieces of one
    length."""
    spec = make_spec(dtype, attention=ATTENTION + KINDS)
    driver = open_driver(spec, dtype=dtype, kv_dtype=kv_dtype, num_slots=4, max_rows=4)
    lengths = (3, 126, 298, 1500)
    for slot, length in enumerate(lengths):
        driver.start(slot, length, 4)
    slots = torch.arange(4)
    for layer in range(spec.num_layers):
        q, k, v = driver.random(16, 4, 16), driver.random(16, 2, 16), driver.random(16, 2, 16)
        driver.tier.submit(layer, slots.repeat_interleave(4), q, k, v)
        collect(driver.tier, 4)
        together_SMD = driver.tier.results_SMD.clone()
        for row in range(4):
            for slot, length in enumerate(lengths):
                driver.tier.begin_token(slot, 50, length + row, driver.blocks[slot])
            driver.tier.submit(layer, slots, q[row::4], k[row::4], v[row::4])
            collect(driver.tier, 4)
            assert_same_bits(driver.tier.results_SD, together_SMD[:, row])
        for slot, length in enumerate(lengths):
            driver.tier.begin_token(slot, 50, length, driver.blocks[slot], 4)


def test_k_and_v_are_read_once_for_all_rows(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_slots=1, max_rows=8)
    driver.start(0, 1000, 8)
    driver.submit(0, [0])
    driver.check(collect(driver.tier, 1)[0])
    assert driver.tier.stats().kv_bytes_read == 1008 * 2 * 2 * 16 * 4


@anywhere_with_seeds
def test_slow_unordered_failing_and_cancelled_tasks_answer_once(open_driver: Callable[..., Driver], seed: int) -> None:
    driver = open_driver(num_slots=8, num_threads=3, num_blocks=600, max_rows=6)
    tier, choose = driver.tier, random.Random(seed)

    def restart(slot: int) -> None:
        driver.start(slot, choose.randrange(600), choose.randint(1, 6))

    for slot in range(8):
        restart(slot)
    outcomes = []
    for step in range(60):
        if step == 10:
            tier.inject(delay_s=0.0005, shuffle_seed=seed, fail_next=7)
        if step == 40:
            tier.inject(shuffle_seed=seed, kill_threads=2)
        layer = step % 3
        slots = choose.sample(range(8), choose.randint(1, 8))
        driver.submit(layer, slots)
        dropped = {slot for slot in slots if choose.random() < 0.2 and tier.cancel(slot)}
        events = collect(tier, len(slots))
        assert sorted(event.slot for event in events) == sorted(slots)
        for event in events:
            if event.slot in dropped:
                outcomes.append("cancelled")
                assert (kind_of(event), event.message) == (ATTENTION_FAILED, "cancelled")
            elif kind_of(event) == ATTENTION_FAILED:
                outcomes.append("failed")
                assert event.epoch == driver.epochs[event.slot] and event.message != "cancelled"
            else:
                outcomes.append("done")
                driver.check(event)
                continue
            driver.expected.pop((event.slot, event.epoch, layer))
            driver.release(event.slot)
            restart(event.slot)
        if layer == 2:  # what is left of a token is dropped with its request
            for slot in range(8):
                driver.release(slot)
                restart(slot)
    assert not driver.expected and not tier.busy
    assert {"cancelled", "failed", "done"} == set(outcomes) and outcomes.count("failed") <= 7 + 2
    done = tier.stats().tasks_done - outcomes.count("done")
    assert 0 <= done <= outcomes.count("cancelled"), "some were cancelled between their end and their event"
    assert tier.stats().threads_alive == 1


@anywhere
def test_a_task_that_failed_can_be_sent_again(open_driver: Callable[..., Driver]) -> None:
    """The second task overwrites what the first appended before it failed."""
    driver = open_driver(num_slots=1, max_rows=3)
    driver.start(0, 255, 3)  # two pieces
    driver.tier.inject(fail_next=1)
    driver.submit(0, [0])
    (event,) = collect(driver.tier, 1)
    assert kind_of(event) == ATTENTION_FAILED
    driver.history[0][0] = tuple(rows_TKH[:255] for rows_TKH in driver.history[0][0])
    driver.submit(0, [0])
    driver.check(collect(driver.tier, 1)[0])


def test_bad_arguments_are_refused_and_leave_nothing_queued(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_blocks=4, num_slots=3, max_rows=3, mailbox=True)
    tier = driver.tier
    for arguments, message in (
        ((0, 1, 0, [0], 0), r"num_rows must be in \[1, 3\], got 0"),
        ((0, 1, 0, [0], 4), r"num_rows must be in \[1, 3\], got 4"),
        ((0, 1, 14, [0], 3), "position 16 needs 2 blocks of 16 tokens, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tier.begin_token(*arguments)
    tier.begin_token(0, 1, 13, [0], 3)
    tier.begin_token(1, 1, 5, [1])

    def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return driver.random(count, 4, 16), driver.random(count, 2, 16), driver.random(count, 2, 16)

    for seats, message in (
        ([0, 0, 0, 0], "slot 0 has 4 seats for 3 tokens"),
        ([1, 0, 0, 0, 1], "slot 1 sits in two seats"),
        ([0, 0, 1, 0], "slot 0 sits in two seats"),
        ([0, 0, -1, 0], "slot 0 sits in two seats"),
        ([0, 0, 0, 2], "slot 2 holds no token"),
    ):
        with pytest.raises(ValueError, match=message):
            tier.submit(0, torch.tensor(seats), *rows(len(seats)))
    for width in (0, 4):
        with pytest.raises(ValueError, match=f"slot 0 is bound to 3 tokens: a task of {width} is not possible"):
            tier.expect(1, torch.tensor([0, 0]), torch.tensor([1, 0]), torch.tensor([1, width]))
    with pytest.raises(RuntimeError, match="there are 1 widths for 2 slots"):
        tier.expect(1, torch.tensor([0, 0]), torch.tensor([1, 0]), torch.tensor([1]))
    assert not tier.busy
    tier.submit(0, torch.tensor([-1, 0, 0, 0, 1]), *rows(5))
    assert sorted((event.slot, event.position) for event in collect(tier, 2)) == [(0, 13), (1, 5)]
    tier.submit(0, torch.tensor([0, 0]), *rows(2))
    collect(tier, 1)
    with pytest.raises(ValueError, match="slot 0 has 3 seats for 2 tokens"):
        tier.submit(1, torch.tensor([0, 0, 0]), *rows(3))
    for max_rows in (0, 17):
        with pytest.raises(ValueError, match=rf"max_rows must be in \[1, 16\], got {max_rows}"):
            open_driver(max_rows=max_rows)


def test_one_row_is_the_default(open_driver: Callable[..., Driver]) -> None:
    tier = open_driver().tier
    assert tier.results_SD.shape == (8, 64) and tier.results_SD.is_contiguous()
    assert tier.results_SMD.data_ptr() == tier.results_SD.data_ptr()
