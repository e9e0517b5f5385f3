"""Rows that come by the mailbox: what `submit` would have made of them, once each, never before their flag."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.core.spec import ModelSpec
from omniserve.core.work import HostEvent
from omniserve.host.tier import HostTier
from tests.events import ATTENTION_DONE, ATTENTION_FAILED, kind_of
from tests.host.helpers import (
    Driver,
    anywhere,
    anywhere_with_seeds,
    assert_same_bits,
    collect,
    cpu_ticks,
    host_threads,
    make_spec,
    make_tier,
    wait_until,
)

HIDDEN = 24
WATCHER = "omni-mailbox"


class MailboxDriver(Driver):
    """A driver whose submits are gathered, as a step does, until `expect_all` and `send_all`, in whatever order."""

    def __init__(self, tier: HostTier, spec: ModelSpec, seed: int = 0) -> None:
        super().__init__(tier, spec, seed)
        self.step = 0
        self.parcels: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []
        self.residuals_SD = torch.full((tier.results_SD.shape[0], HIDDEN), torch.nan, dtype=self.dtype)

    def send(self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.parcels.append((layer, slots, q, k, v))

    def new_step(self) -> None:
        self.step += 1
        self.parcels = []

    def expect_all(self) -> None:
        layers_R = torch.cat([torch.full_like(slots, layer) for layer, slots, *_ in self.parcels])
        self.tier.expect(self.step, layers_R, torch.cat([slots for _, slots, *_ in self.parcels]))

    def send_all(self, choose: random.Random | None = None) -> None:
        """Layer by layer; with `choose`, the seats of a layer in random parts and order, with random pauses."""
        assert self.tier.mailbox_SW is not None and self.tier.flags_S is not None
        for _, slots, *qkv in self.parcels:
            seats = list(range(len(slots)))
            if choose is not None:
                choose.shuffle(seats)
            while seats:
                count = len(seats) if choose is None else choose.randint(1, len(seats))
                part = torch.tensor([seats.pop() for _ in range(count)])
                # Two device rows, which nobody may look at, before the seats.
                rows = [torch.cat([x.new_full((2, *x.shape[1:]), torch.nan), x[part]]) for x in qkv]
                hidden_TD = torch.arange(2.0 + count)[:, None].repeat(1, HIDDEN).to(self.dtype)
                step_1 = torch.tensor([self.step])
                if choose is not None and choose.random() < 0.5:
                    time.sleep(choose.choice((0.0, 0.0001, 0.001)))
                torch.ops.omniserve.piggyback_send(
                    hidden_TD, *rows, slots[part], self.residuals_SD, self.tier.mailbox_SW, self.tier.flags_S, step_1
                )

    def check(self, event: HostEvent) -> None:
        super().check(event)
        self.poison_row(event.slot)

    def poison_row(self, slot: int) -> None:
        assert self.tier.mailbox_SW is not None
        self.tier.mailbox_SW[slot] = torch.nan


@pytest.fixture
def open_mailbox(open_driver: Callable[..., Driver]) -> Callable[..., MailboxDriver]:
    def open_one(spec: ModelSpec | None = None, **settings: Any) -> MailboxDriver:
        plain = open_driver(spec, mailbox=True, **settings)
        return MailboxDriver(plain.tier, plain.spec)

    return open_one


def nothing_comes(tier: HostTier) -> None:
    time.sleep(0.02)
    assert tier.poll() == [] and tier.busy and tier.attends


@pytest.mark.parametrize(
    ("place", "dtype", "kv_dtype", "spin_s"),
    [
        ("here", torch.float32, "auto", 200e-6),
        ("network", torch.bfloat16, "auto", 0.0),
        ("here", torch.float16, "auto", 3600.0),
        ("network", torch.bfloat16, "int8", 200e-6),
    ],
)
def test_random_histories_give_submits_results_to_the_bit(
    open_driver: Callable[..., Driver],
    open_mailbox: Callable[..., MailboxDriver],
    dtype: torch.dtype,
    kv_dtype: str,
    spin_s: float,
) -> None:
    spec = make_spec(dtype)
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "num_blocks": 400, "num_slots": 9}
    plain = open_driver(spec, **settings)
    mailbox = open_mailbox(spec, mailbox_spin_s=spin_s, **settings)
    choose, delays = random.Random(3), random.Random(4)
    next_layer = [0] * 9
    for slot in range(9):
        context_len = choose.choice((0, 5, 130, 600))
        for driver in (plain, mailbox):
            driver.start(slot, context_len)
    total = 0
    for _ in range(30):
        going = [slot for slot in range(9) if choose.random() < 0.7]
        total += len(going)
        mailbox.new_step()
        for layer in range(spec.num_layers):
            seats = [slot for slot in going if next_layer[slot] == layer] + [-1] * choose.randrange(1, 3)
            choose.shuffle(seats)
            for driver in (plain, mailbox):
                driver.submit(layer, seats)
        sender = threading.Thread(target=mailbox.send_all, args=(delays,))
        if choose.random() < 0.3:
            sender.start()  # some flags are there, or all, before anybody asks
        mailbox.expect_all()
        if sender.ident is None:
            sender.start()
        for driver in (plain, mailbox):
            for event in collect(driver.tier, len(going)):
                assert event.layer == next_layer[event.slot]
                driver.check(event)
        sender.join()
        for slot in going:
            assert_same_bits(mailbox.tier.results_SD[slot], plain.tier.results_SD[slot])
            assert mailbox.residuals_SD[slot].isfinite().all()
            next_layer[slot] = (next_layer[slot] + 1) % spec.num_layers
            if next_layer[slot] == 0:
                start_anew, context_len = choose.random() < 0.2, choose.randrange(200)
                for driver in (plain, mailbox):
                    if start_anew:
                        driver.release(slot)
                        driver.start(slot, context_len)
                    else:
                        driver.begin(slot)
    assert total > 150 and not mailbox.expected
    assert_same_bits(mailbox.tier.pool_LBK2SH, plain.tier.pool_LBK2SH)
    if mailbox.tier.scales_LBK2S is not None and plain.tier.scales_LBK2S is not None:
        assert_same_bits(mailbox.tier.scales_LBK2S, plain.tier.scales_LBK2S)
    assert mailbox.tier.stats().tasks_done == total and not mailbox.tier.busy


@anywhere
def test_no_flag_but_the_steps_own_is_taken(open_mailbox: Callable[..., MailboxDriver]) -> None:
    driver = open_mailbox(num_slots=2)
    tier = driver.tier
    assert tier.flags_S is not None and tier.flags_S.tolist() == [0, 0]
    for slot in range(2):
        driver.start(slot, 20)
    driver.step = 6
    for layer in range(3):
        driver.new_step()
        driver.submit(layer, [1, 0])
        driver.expect_all()
        nothing_comes(tier)  # also in the second round, when the flags hold the step before
        for wrong in (0, driver.step - 1, driver.step + 1, -driver.step, driver.step + 2**32):
            tier.flags_S.fill_(wrong)  # and the mailbox holds NaN
            nothing_comes(tier)
        driver.send_all()
        for event in collect(tier, 2):
            driver.check(event)


@anywhere
def test_rows_may_come_in_any_order_and_one_that_does_not_holds_up_nobody(
    open_mailbox: Callable[..., MailboxDriver],
) -> None:
    for spin_s in (0.0, 3600.0):
        driver = open_mailbox(num_slots=4, mailbox_spin_s=spin_s)
        for slot in range(4):
            driver.start(slot, 50)
        late = []
        for layer, slots in ((0, [0]), (0, [1]), (1, [2]), (2, [3])):
            driver.new_step()
            driver.submit(layer, slots)
            driver.expect_all()
            late.append((driver.step, driver.parcels))
        for place in (3, 1, 2, 0):
            driver.step, driver.parcels = late[place]
            driver.send_all()
            (event,) = collect(driver.tier, 1)
            assert event.slot == place
            driver.check(event)


@anywhere
def test_hundreds_of_rows_over_many_layers(open_mailbox: Callable[..., MailboxDriver]) -> None:
    spec = make_spec(attention=make_spec().attention * 4)
    driver = open_mailbox(spec, num_slots=360, num_blocks=800, num_threads=3)
    for slot in range(360):
        driver.start(slot, slot % 31)
    driver.new_step()
    for layer in range(12):
        driver.submit(layer, [*range(layer, 360, 12), -1])
    driver.expect_all()
    assert driver.tier.stats().tasks_in_hand == 360
    driver.send_all(random.Random(0))
    for event in collect(driver.tier, 360):
        assert event.layer == event.slot % 12
        driver.check(event)


@anywhere
def test_a_cancelled_row_is_waited_for(open_mailbox: Callable[..., MailboxDriver]) -> None:
    driver = open_mailbox(num_slots=3)
    tier = driver.tier
    for slot in range(3):
        driver.start(slot, 40)
    driver.new_step()
    driver.submit(1, [0, 1, 2])
    driver.expect_all()
    assert tier.cancel(0) and tier.cancel(1) and tier.cancel(0)
    nothing_comes(tier)
    for slot in range(3):
        with pytest.raises(ValueError, match="in flight"):
            tier.begin_token(slot, 9, 0, [0])
    driver.send_all()
    for event in collect(tier, 3):
        if event.slot == 2:
            driver.check(event)
        else:
            assert (kind_of(event), event.message) == (ATTENTION_FAILED, "cancelled")
            assert (event.epoch, event.layer, event.position) == (1, 1, 40)
            assert not tier.cancel(event.slot)
            driver.poison_row(event.slot)
            driver.release(event.slot)
            driver.start(event.slot, 7)
            driver.history[event.slot][1] = driver.history[event.slot][0]
    assert tier.stats().failures == 0 and not tier.busy
    driver.new_step()
    driver.submit(0, [1, 0])
    driver.expect_all()
    driver.send_all()
    for event in collect(tier, 2):
        driver.check(event)


@anywhere_with_seeds
def test_slow_unordered_failing_and_dying_workers_answer_every_row_once(
    open_mailbox: Callable[..., MailboxDriver], seed: int
) -> None:
    driver = open_mailbox(num_slots=16, num_threads=3, num_blocks=600)
    tier, choose, delays = driver.tier, random.Random(seed), random.Random(seed)
    for slot in range(16):
        driver.start(slot, choose.randrange(300))
    num_failed = num_cancelled = 0
    for step in range(30):
        if step == 5:
            tier.inject(delay_s=0.001, shuffle_seed=seed, fail_next=7)
        if step == 15:
            tier.inject(shuffle_seed=seed, kill_threads=2)
        if step == 25:
            tier.inject(shuffle_seed=seed, kill_threads=1)  # from here on everything fails
        driver.new_step()
        slots = choose.sample(range(16), 12)
        driver.submit(0, slots[:7])
        driver.submit(1, slots[7:])
        driver.expect_all()
        dropped = set()
        sender = threading.Thread(target=driver.send_all, args=(delays,))
        sender.start()
        for slot in slots:
            if choose.random() < 0.2:
                assert tier.cancel(slot)
                dropped.add(slot)
        events = collect(tier, 12)
        sender.join()
        assert sorted(event.slot for event in events) == sorted(slots)
        for event in events:
            if event.slot in dropped:
                num_cancelled += 1
                assert event.message == "cancelled"
            elif kind_of(event) == ATTENTION_DONE:
                driver.check(event)
            else:
                num_failed += 1
                assert kind_of(event) == ATTENTION_FAILED and event.message
            driver.poison_row(event.slot)
            driver.expected.pop((event.slot, event.epoch, event.layer), None)
            driver.release(event.slot)
            driver.start(event.slot, choose.randrange(300))
    assert num_failed > 9 and num_cancelled > 0
    stats = tier.stats()
    assert stats.threads_alive == 0 and not tier.busy
    assert num_failed <= stats.failures <= num_failed + num_cancelled  # some failed before they were cancelled
    assert len(host_threads(WATCHER)) == 1


def test_without_workers_a_row_fails_when_its_flag_comes(open_mailbox: Callable[..., MailboxDriver]) -> None:
    driver = open_mailbox(num_slots=3, num_threads=1)
    tier = driver.tier
    for slot in range(3):
        driver.start(slot, 40)
    driver.new_step()
    driver.submit(0, [0])
    driver.submit(1, [1, 2])
    driver.expect_all()
    tier.inject(kill_threads=1)
    first, driver.parcels = driver.parcels[:1], driver.parcels[1:]
    second, driver.parcels = driver.parcels, first
    driver.send_all()
    assert [(kind_of(event), event.slot) for event in collect(tier, 1)] == [(ATTENTION_FAILED, 0)]
    wait_until(lambda: not tier.healthy)
    nothing_comes(tier)  # the device may still write the others
    driver.parcels = second
    driver.send_all()
    events = collect(tier, 2)
    assert {kind_of(event) for event in events} == {ATTENTION_FAILED} and not tier.busy


@anywhere
def test_close_fails_what_is_expected_at_once(open_mailbox: Callable[..., MailboxDriver]) -> None:
    driver = open_mailbox(num_slots=5)
    tier = driver.tier
    for slot in range(5):
        driver.start(slot, 30)
    driver.new_step()
    driver.submit(0, [0, 1, 2, 3])
    driver.expect_all()
    assert tier.cancel(1)
    tier.close()
    tier.close()
    assert not host_threads(WATCHER) and not host_threads() and not tier.busy
    events = {event.slot: event for event in tier.poll()}
    assert sorted(events) == [0, 1, 2, 3]
    assert {kind_of(event) for event in events.values()} == {ATTENTION_FAILED}
    assert events[1].message == "cancelled" and events[0].message == "the host tier was closed"
    driver.send_all()
    assert tier.poll() == []
    with pytest.raises(ValueError, match="the host tier is closed"):
        tier.expect(9, torch.tensor([0]), torch.tensor([4]))


def test_the_watcher_sleeps_while_nothing_is_expected_and_rests_while_nothing_comes(
    open_mailbox: Callable[..., MailboxDriver],
) -> None:
    driver = open_mailbox(num_slots=1, mailbox_spin_s=0.0, mailbox_sleep_s=0.01)
    driver.start(0, 30)
    (thread,) = host_threads(WATCHER)
    before = cpu_ticks(thread)
    time.sleep(0.3)  # twice: 60 ticks for a thread that spins; time that the hypervisor steals counts, too
    driver.new_step()
    driver.submit(0, [0])
    driver.expect_all()
    time.sleep(0.3)
    assert cpu_ticks(thread) - before < 20
    driver.send_all()
    driver.check(collect(driver.tier, 1)[0])


def test_the_watcher_may_use_every_core_of_the_workers() -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    tier = make_tier(make_spec(), cores=cores, mailbox=True)
    (thread,) = host_threads(WATCHER)
    assert os.sched_getaffinity(int(thread.name)) == set(cores)
    del tier
    assert not host_threads(WATCHER)


def test_without_a_mailbox_there_is_none(open_driver: Callable[..., Driver]) -> None:
    driver = open_driver()
    driver.start(0, 5)
    assert driver.tier.mailbox_SW is None and driver.tier.flags_S is None and not host_threads(WATCHER)
    with pytest.raises(ValueError, match="no mailbox: make it with mailbox=True"):
        driver.tier.expect(1, torch.tensor([0]), torch.tensor([0]))


def test_bad_arguments_are_refused_and_nothing_is_expected(open_mailbox: Callable[..., MailboxDriver]) -> None:
    driver = open_mailbox(num_slots=4)
    tier = driver.tier
    for slot in range(3):
        driver.start(slot, 5)
    for step, layers, slots, message in (
        (1, [0, 0], [0, 4], r"slot must be in \[0, 4\), got 4"),
        (1, [0, 0], [0, -2], r"slot must be in \[0, 4\), got -2"),
        (1, [0, 3], [0, 1], r"layer must be in \[0, 3\), got 3"),
        (1, [0, -1], [0, 1], r"layer must be in \[0, 3\), got -1"),
        (1, [0, 0], [0, 3], "slot 3 holds no token: call begin_token"),
        (1, [0, 1], [0, 0], "slot 0 sits in two seats"),
        (0, [0, 0], [0, 1], "step must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tier.expect(step, torch.tensor(layers), torch.tensor(slots))
    good = torch.tensor([0])
    for layers_R, slots_R, error in (
        (torch.tensor([0, 0]), good, "there are 2 layers for 1 slots"),
        (good.int(), good, "layers must be Long"),
        (good, good.int(), "slots must be Long"),
        (torch.tensor([0, 0, 0])[::2], torch.tensor([0, 1]), "layers must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=error):
            tier.expect(1, layers_R, slots_R)
    assert not tier.busy
    tier.expect(1, torch.tensor([-1, -1]), torch.tensor([-1, -1]))
    tier.expect(1, torch.empty(0).long(), torch.empty(0).long())
    assert not tier.busy
    driver.step = 4
    driver.new_step()
    driver.submit(0, [0, -1, 1])
    driver.expect_all()
    with pytest.raises(ValueError, match="slot 0 has a task in flight: poll"):
        tier.expect(6, torch.tensor([0, 0]), torch.tensor([2, 0]))
    rows = driver.random(1, 4, 16), driver.random(1, 2, 16), driver.random(1, 2, 16)
    with pytest.raises(ValueError, match="slot 0 has a task in flight: poll"):
        tier.submit(0, torch.tensor([0]), *rows)
    driver.send_all()
    for event in collect(tier, 2):
        driver.check(event)
    with pytest.raises(ValueError, match="slot 0 was expected in step 5 before: steps rise, got 5"):
        tier.expect(5, torch.tensor([1]), torch.tensor([0]))
    tier.submit(1, torch.tensor([0]), *rows)  # both ways, one after the other
    assert [kind_of(event) for event in collect(tier, 1)] == [ATTENTION_DONE]
    with pytest.raises(ValueError, match="mailbox_spin_s and mailbox_sleep_s must be >= 0"):
        make_tier(make_spec(), mailbox=True, mailbox_sleep_s=-1.0)
