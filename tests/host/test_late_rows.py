"""Rows that the device may skip: what is expected of them goes without a trace, and a slot has one event at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from omniserve.host.tier import HostTier, result_flag
from tests.events import ATTENTION_DONE, ATTENTION_FAILED, kind_of
from tests.host.helpers import Driver, anywhere, collect, wait_until
from tests.host.test_mailbox import MailboxDriver

LAYERS = 3  # of make_spec


@pytest.fixture
def driver(open_driver: Callable[..., Driver]) -> MailboxDriver:
    plain = open_driver(mailbox=True, num_slots=4)
    made = MailboxDriver(plain.tier, plain.spec)
    for slot in range(4):
        made.start(slot, 40 + slot)
    return made


def send(driver: MailboxDriver, step: int, layer: int, slot: int) -> None:
    """Let the device send a slot's row in a step."""
    driver.step, driver.parcels = step, []
    driver.submit(layer, [slot])
    driver.send_all()


def expect(tier: HostTier, step: int, layer: int, *slots: int) -> None:
    tier.expect(step, torch.full((len(slots),), layer), torch.tensor(slots), may_skip=True)


def skip(tier: HostTier, step: int, *slots: int) -> None:
    assert tier.skips_S is not None
    tier.skips_S[list(slots)] = step


def is_idle(tier: HostTier) -> bool:
    return not tier.busy


def has_result(driver: MailboxDriver, layer: int, slot: int) -> bool:
    assert driver.tier.result_flags_S is not None
    wanted = result_flag(driver.epochs[slot], layer, 40 + slot)
    return int(driver.tier.result_flags_S[slot]) == wanted


@anywhere
def test_a_result_has_its_flag_when_its_event_comes_and_no_other_has(driver: MailboxDriver) -> None:
    for layer in range(LAYERS):
        assert not has_result(driver, layer, 2)
        expect(driver.tier, layer + 1, layer, 2)
        send(driver, layer + 1, layer, 2)
        driver.check(collect(driver.tier, 1)[0])
        assert has_result(driver, layer, 2)
    driver.tier.inject(fail_next=1)
    driver.begin(2)
    expect(driver.tier, 9, 0, 2)
    driver.step, driver.parcels = 9, []
    driver.submit(0, [2])
    driver.send_all()
    assert kind_of(collect(driver.tier, 1)[0]) == ATTENTION_FAILED
    assert int(driver.tier.result_flags_S[2]) == result_flag(1, LAYERS - 1, 42), "a failed task has no result"


def test_flags_name_results_and_are_positive() -> None:
    flags = [
        result_flag(epoch, layer, position)
        for epoch in (0, 1, 2**27 - 1) for layer in (0, 1, 4094) for position in (0, 1, 2**24 - 1)
    ]  # fmt: skip
    assert len(set(flags)) == len(flags) and min(flags) > 0 and max(flags) < 2**63


@anywhere
def test_a_row_that_is_skipped_leaves_the_slots_result_as_it_is(driver: MailboxDriver) -> None:
    tier = driver.tier
    expect(tier, 1, 0, 0)
    expect(tier, 2, 1, 0)  # the device is told to join a result that is not there
    send(driver, 1, 0, 0)
    skip(tier, 2, 0)  # a device sends and skips a slot's rows in the order of its steps
    driver.check(collect(tier, 1)[0])
    wait_until(lambda: is_idle(tier))
    expect(tier, 3, 1, 0)
    send(driver, 3, 1, 0)
    driver.check(collect(tier, 1)[0])
    assert tier.stats().tasks_done == 2 and not tier.busy


@anywhere
def test_a_row_that_comes_takes_the_place_of_a_result_that_was_not_polled(driver: MailboxDriver) -> None:
    tier = driver.tier
    for layer in range(LAYERS):
        expect(tier, layer + 1, layer, 0)
    for layer in range(LAYERS):
        send(driver, layer + 1, layer, 0)
        wait_until(lambda layer=layer: has_result(driver, layer, 0))
    (event,) = tier.poll()
    assert event.layer == LAYERS - 1 and tier.stats().tasks_done == LAYERS
    driver.check(event)
    assert not tier.busy


@anywhere
def test_a_later_skip_does_not_hide_that_a_row_was_sent(driver: MailboxDriver) -> None:
    """The device may be two steps ahead of the thread that watches its flags."""
    tier = driver.tier
    send(driver, 1, 0, 0)
    skip(tier, 2, 0)
    expect(tier, 1, 0, 0)
    expect(tier, 2, 1, 0)
    event = collect(tier, 1)[0]
    assert event.layer == 0
    driver.check(event)
    wait_until(lambda: is_idle(tier))


@anywhere
def test_a_row_that_is_sent_shows_that_an_earlier_one_was_skipped(driver: MailboxDriver) -> None:
    tier = driver.tier
    expect(tier, 1, 0, 0)
    send(driver, 1, 0, 0)
    driver.check(collect(tier, 1)[0])
    expect(tier, 2, 1, 0)
    expect(tier, 3, 2, 0)
    expect(tier, 4, 1, 0)
    send(driver, 4, 1, 0)
    event = collect(tier, 1)[0]
    assert event.layer == 1
    driver.check(event)
    wait_until(lambda: is_idle(tier))
    driver.begin(0)  # nothing is expected of the slot any more


@anywhere
@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("when", ["running", "done", "polled"])
def test_a_cancelled_slot_waits_for_what_the_device_may_send(driver: MailboxDriver, when: str, is_sent: bool) -> None:
    tier = driver.tier
    expect(tier, 1, 0, 0)
    if when == "running":
        tier.inject(delay_s=0.05)
    send(driver, 1, 0, 0)
    if when != "running":
        wait_until(lambda: has_result(driver, 0, 0))
    if when == "polled":
        driver.check(collect(tier, 1)[0])
    expect(tier, 2, 1, 0)
    expect(tier, 3, 2, 0)
    assert tier.cancel(0) and tier.cancel(0)
    time.sleep(0.1)
    assert tier.poll() == []
    if is_sent:
        tier.flags_S[0] = 2
    else:
        skip(tier, 2, 0)
    time.sleep(0.02)
    assert tier.poll() == [], "the device may still send the next one"
    with pytest.raises(ValueError, match="in flight"):
        tier.begin_token(0, 9, 0, [0])
    skip(tier, 3, 0)
    (event,) = collect(tier, 1)
    assert (kind_of(event), event.message) == (ATTENTION_FAILED, "cancelled")
    assert (event.slot, event.epoch, event.position, event.layer) == (0, 1, 40, 1 if is_sent else 0)
    assert not tier.cancel(0) and not tier.busy
    driver.release(0)
    driver.start(0, 7)


@anywhere
def test_a_slot_without_a_task_that_is_cancelled_says_so_once(driver: MailboxDriver) -> None:
    """The device may have skipped the row that the caller thinks of."""
    assert driver.tier.cancel(3)
    (event,) = driver.tier.poll()
    assert (event.slot, event.epoch, event.message) == (3, 1, "cancelled")
    assert not driver.tier.cancel(3) and driver.tier.poll() == []


@anywhere
@pytest.mark.parametrize("is_expected_before", [False, True])
def test_a_failure_is_told_when_the_device_will_not_write_the_row(
    driver: MailboxDriver, is_expected_before: bool
) -> None:
    tier = driver.tier
    tier.inject(fail_next=1)
    expect(tier, 1, 0, 1)
    if is_expected_before:
        expect(tier, 2, 1, 1)
    send(driver, 1, 0, 1)
    if not is_expected_before:
        wait_until(lambda: tier.stats().failures == 1)
        expect(tier, 2, 1, 1)
    wait_until(lambda: tier.stats().failures == 1)
    time.sleep(0.01)
    assert tier.poll() == [] and not has_result(driver, 0, 1)
    skip(tier, 2, 1)
    (event,) = collect(tier, 1)
    assert (kind_of(event), event.layer) == (ATTENTION_FAILED, 0) and "injected" in event.message
    driver.begin(1)


def test_without_workers_what_follows_is_answered_once(driver: MailboxDriver) -> None:
    tier = driver.tier
    tier.inject(kill_threads=2)
    expect(tier, 1, 0, 0, 1, 2)
    expect(tier, 2, 1, 0, 1, 2)
    for slot in range(3):
        send(driver, 1, 0, slot)
    wait_until(lambda: not tier.healthy)
    skip(tier, 2, 0, 1, 2)
    events = collect(tier, 3)
    assert sorted(event.slot for event in events) == [0, 1, 2]
    assert {kind_of(event) for event in events} == {ATTENTION_FAILED} and not tier.busy


@anywhere
def test_close_answers_each_slot_once(driver: MailboxDriver) -> None:
    tier = driver.tier
    expect(tier, 1, 0, 0, 1, 2, 3)
    for slot in (0, 1, 2):
        send(driver, 1, 0, slot)
        wait_until(lambda slot=slot: has_result(driver, 0, slot))
    expect(tier, 2, 1, 0, 1, 2, 3)
    expect(tier, 3, 2, 2, 3)
    tier.cancel(1)
    tier.close()
    assert not tier.busy
    events = {event.slot: event for event in tier.poll()}
    assert sorted(events) == [0, 1, 2, 3] and tier.poll() == []
    kinds = [kind_of(events[slot]) for slot in range(4)]
    done, failed = ATTENTION_DONE, ATTENTION_FAILED
    assert kinds == [done, failed, done, failed] and events[1].message == "cancelled"
    assert events[3].message == "the host tier was closed"


@anywhere
def test_the_next_token_may_begin_when_the_device_has_used_the_last_result(driver: MailboxDriver) -> None:
    tier = driver.tier
    for layer in range(LAYERS):
        expect(tier, layer + 1, layer, 0)
        send(driver, layer + 1, layer, 0)
        wait_until(lambda layer=layer: has_result(driver, layer, 0))
    driver.begin(0)
    assert tier.poll() == []
    expect(tier, 9, 0, 0)
    with pytest.raises(ValueError, match="in flight"):
        driver.begin(0)
