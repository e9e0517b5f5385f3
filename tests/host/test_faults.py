"""Whatever goes wrong, each task and each move yields exactly one event."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
import torch

from omniserve.core.work import KVMove, MoveDirection
from tests.events import ATTENTION_DONE, ATTENTION_FAILED, WORK_FAILED, kind_of
from tests.host.helpers import BLOCK_SIZE, Driver, anywhere, collect, wait_until


@anywhere
@pytest.mark.parametrize("seed", range(3))
def test_slow_unordered_failing_and_dying_workers_answer_every_task_once(
    open_driver: Callable[..., Driver], seed: int
) -> None:
    driver = open_driver(num_slots=16, num_threads=3, num_blocks=600)
    choose = random.Random(seed)
    for slot in range(16):
        driver.start(slot, choose.randrange(400))
    submitted, done, failed, orders = 0, 0, 0, []
    for step in range(30):
        if step == 5:
            driver.tier.inject(delay_s=0.001, shuffle_seed=seed, fail_next=7)
        if step == 20:
            driver.tier.inject(shuffle_seed=seed, kill_threads=2)
        slots = choose.sample(range(16), 8)
        driver.submit(step % 3, slots)
        submitted += len(slots)
        events = collect(driver.tier, len(slots))
        orders.append([event.slot for event in events] == slots)
        assert sorted(event.slot for event in events) == sorted(slots)
        for event in events:
            if kind_of(event) == ATTENTION_DONE:
                driver.check(event)
                done += 1
            else:
                assert kind_of(event) == ATTENTION_FAILED and event.message
                assert event.epoch == driver.epochs[event.slot] and event.layer == step % 3
                failed += 1
                driver.release(event.slot)
                driver.start(event.slot, choose.randrange(400))
        if step % 3 == 2:
            for slot in range(16):
                driver.release(slot)
                driver.start(slot, choose.randrange(400))
    assert not all(orders[5:])
    assert failed == 7 + 2 and done + failed == submitted
    assert driver.tier.stats().tasks_done == done and driver.tier.stats().failures == failed
    assert driver.tier.stats().threads_alive == 1 and driver.tier.healthy and not driver.tier.busy


def test_when_the_last_worker_dies_everything_is_reported_failed(
    open_driver: Callable[..., Driver], caplog: pytest.LogCaptureFixture
) -> None:
    driver = open_driver(num_slots=6, num_threads=2)
    tier = driver.tier
    for slot in range(6):
        driver.start(slot, 40)
    device = torch.zeros(3, 4, 2, BLOCK_SIZE, 16)
    tier.inject(kill_threads=2)
    with caplog.at_level(logging.ERROR):
        driver.submit(0, range(6))
        events = collect(tier, 6)
        assert {kind_of(event) for event in events} == {ATTENTION_FAILED}
        assert sorted(event.slot for event in events) == list(range(6))
        wait_until(lambda: not tier.healthy)
        driver.submit(1, [3])
        assert [kind_of(event) for event in tier.poll()] == [ATTENTION_FAILED]  # at once
        move = KVMove(
            request_id="r", move_id=5, direction=MoveDirection.TO_HOST, src_block_ids=(1,), dst_block_ids=(2,)
        )
        tier.start_move(move, device, device.clone())
        (event,) = tier.poll()
        assert (kind_of(event), event.move_id) == (WORK_FAILED, 5) and event.message
    assert tier.stats().failures == 8 and not tier.busy
    messages = [record.getMessage() for record in caplog.records]
    assert 0 < len(messages) == len(set(messages)) < 8  # each reason once


@anywhere
def test_a_cancelled_task_keeps_its_blocks_until_its_event(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_slots=4, num_threads=1, num_blocks=40)
    tier = driver.tier
    for slot in range(3):
        driver.start(slot, 150)
    assert not tier.cancel(3), "there is no task"
    tier.inject(delay_s=0.1)
    driver.submit(0, [0, 1, 2])  # 0 runs, or is about to; 1 and 2 are queued
    assert tier.cancel(0) and tier.cancel(1)
    assert tier.cancel(1), "its event is still to come"
    with pytest.raises(ValueError, match="in flight"):
        tier.begin_token(0, 9, 0, [0])
    seen = {event.slot: event for event in collect(tier, 3)}
    tier.inject()
    driver.check(seen[2])
    for slot in (0, 1):
        event = seen[slot]
        assert (kind_of(event), event.message) == (ATTENTION_FAILED, "cancelled")
        assert (event.epoch, event.layer, event.position) == (1, 0, 150)
        assert not tier.cancel(slot), "its event was polled"
        with pytest.raises(ValueError, match="holds no token"):
            tier.submit(1, torch.tensor([slot]), *(driver.random(1, n, 16) for n in (4, 2, 2)))
        driver.release(slot)  # poisons the blocks
    assert tier.stats().failures == 0 and tier.stats().tasks_done == 1
    driver.start(3, 290)  # takes over the blocks of both
    for layer in range(3):
        driver.submit(layer, [3])
        driver.check(collect(tier, 1)[0])


@anywhere
def test_cancels_at_any_time_leave_no_thread_on_the_blocks(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_slots=8, num_threads=3, num_blocks=400)
    choose = random.Random(1)
    for slot in range(8):
        driver.start(slot, choose.randrange(600))
    kinds = set()
    for step in range(60):
        driver.submit(step % 3, range(8))
        dropped = {slot for slot in range(8) if choose.random() < 0.4 and driver.tier.cancel(slot)}
        for event in collect(driver.tier, 8):
            kinds.add(event.message)
            if event.slot in dropped:
                assert event.message == "cancelled"
                driver.expected.pop((event.slot, event.epoch, event.layer))
            else:
                driver.check(event)
        for slot in range(8):
            if slot in dropped or step % 3 == 2:
                driver.release(slot)
                driver.start(slot, choose.randrange(600))
    assert kinds == {"", "cancelled"} and not driver.expected


@anywhere
def test_a_fault_setting_replaces_the_one_before(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver(num_slots=1)
    driver.start(0, 10)
    driver.tier.inject(fail_next=100)
    driver.tier.inject(delay_s=3600)
    driver.submit(0, [0])
    driver.tier.inject()  # also ends the delay, if it is under way
    driver.check(collect(driver.tier, 1)[0])
    for bad in ({"delay_s": -1.0}, {"delay_s": float("nan")}, {"fail_next": -1}, {"shuffle_seed": -1}):
        with pytest.raises(ValueError, match="must be >= 0"):
            driver.tier.inject(**bad)
