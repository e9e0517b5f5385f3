"""A move that fails half-way is reported only when nothing of it uses its blocks any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.core.work import KVMove, MoveDirection
from omniserve.host.mover import DirectMover, Mover, StagedMover
from tests.events import WORK_DONE, WORK_FAILED, Kind, kind_of
from tests.host.helpers import BLOCK_SIZE, Driver

TO_HOST, TO_DEVICE = MoveDirection.TO_HOST, MoveDirection.TO_DEVICE
NO_ROOM = torch.OutOfMemoryError("no memory")


class SideStream:
    """A stream whose work is over when `is_idle`; notes what it is given."""

    def __init__(self) -> None:
        self.is_idle = False
        self.calls: list[str] = []
        self.num_refused_events = 0

    def record_event(self) -> SideStream:
        if self.num_refused_events:
            self.num_refused_events -= 1
            raise NO_ROOM
        self.calls.append("event")
        return self

    def query(self) -> bool:
        return self.is_idle


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return SideStream()


def move(move_id: int, direction: MoveDirection = TO_HOST) -> KVMove:
    return KVMove(request_id="r", move_id=move_id, direction=direction, src_block_ids=(3,), dst_block_ids=(3,))


def cache(driver: Driver, num_blocks: int) -> Tensor:
    return driver.random(driver.spec.num_layers, num_blocks, driver.spec.num_kv_heads, BLOCK_SIZE, 16)


def not_a_v(k_LBKSH: Tensor) -> Tensor:
    """Return what the copy of V fails with, after that of K was launched."""
    return k_LBKSH[..., :5]


def staged(driver: Driver, stream: SideStream, host_copy: Callable[..., None]) -> StagedMover:
    spec = driver.spec
    shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_size)
    mover = StagedMover(shape, torch.float32, driver.tier.num_blocks, host_copy, pin_memory=False)
    mover._stream = stream  # type: ignore[assignment]
    return mover


def ends(mover: Mover) -> list[tuple[int, Kind]]:
    return [(event.move_id, kind_of(event)) for event in mover.advance()]


def test_staged_one_whose_second_copy_fails_ends_after_the_first(
    open_driver: Callable[..., Driver], stream: SideStream
) -> None:
    """Regression: its failure was reported while the copy of K still ran, into blocks that got a new owner."""
    driver = open_driver(num_blocks=20)
    copies: list[int] = []
    mover = staged(driver, stream, lambda copy_id, *_: copies.append(copy_id))
    k = cache(driver, 10)
    mover.start(move(0), k, not_a_v(k))
    mover.start(move(1), k, k)
    for _ in range(3):
        assert ends(mover) == [] and stream.calls == ["event"], "K was copied, V was refused, and then came the event"
        assert mover.busy and not mover.can_advance and mover.num_moves == 2
    stream.is_idle = True
    assert ends(mover) == [(0, WORK_FAILED)]
    assert mover.num_failures == 1 and stream.calls == ["event"] * 2 and len(copies) == 1, "the next one has begun"


def test_staged_one_to_the_device_whose_second_copy_fails_ends_after_the_first(
    open_driver: Callable[..., Driver], stream: SideStream
) -> None:
    driver = open_driver(num_blocks=20)
    mover = staged(driver, stream, lambda *_: None)
    k = cache(driver, 10)
    mover.start(move(0, TO_DEVICE), k, not_a_v(k))
    assert ends(mover) == [] and stream.calls == []
    assert mover.takes(-2, ""), "the worker threads have filled the buffer"
    assert ends(mover) == [] and stream.calls == ["event"]
    stream.is_idle = True
    assert ends(mover) == [(0, WORK_FAILED)] and not mover.busy


def test_staged_one_that_the_worker_threads_do_not_take_fails_and_holds_up_no_other(
    open_driver: Callable[..., Driver], stream: SideStream
) -> None:
    driver = open_driver(num_blocks=20)
    refusals = [NO_ROOM]

    def host_copy(*_: Any) -> None:
        if refusals:
            raise refusals.pop()

    stream.is_idle = True
    mover = staged(driver, stream, host_copy)
    device = cache(driver, 10)
    for move_id in range(2):
        mover.start(move(move_id), device, device)
    assert ends(mover) == [(0, WORK_FAILED)] and mover.num_moves == 0
    assert mover.takes(-2, "") and ends(mover) == [(1, WORK_DONE)]


@pytest.mark.parametrize("fails", ["launch", "event"])
def test_direct_one_that_fails_after_its_launch_ends_when_the_device_is_done(
    open_driver: Callable[..., Driver], stream: SideStream, fails: str
) -> None:
    driver = open_driver(num_blocks=20)
    mover = DirectMover(driver.tier.pool_LBK2SH)
    mover._stream = stream  # type: ignore[assignment]
    copy_blocks = mover._copy_blocks

    def launch(*args: Any, **kwargs: Any) -> None:
        copy_blocks(*args, **kwargs)
        stream.calls.append("copy")
        if fails == "launch":
            raise NO_ROOM

    mover._copy_blocks = launch
    stream.num_refused_events = int(fails == "event")
    device = cache(driver, 10)
    mover.start(move(0), device, device)
    assert ends(mover) == [] and stream.calls == ["copy", "event"]
    (copy,) = mover._queue
    assert copy.ids_2M is not None, "the copy reads them"
    stream.is_idle = True
    assert ends(mover) == [(0, WORK_FAILED)] and mover.num_failures == 1


def test_a_device_that_cannot_say_when_it_is_done_is_no_failed_move(
    open_driver: Callable[..., Driver], stream: SideStream
) -> None:
    driver = open_driver(num_blocks=20)
    mover = staged(driver, stream, lambda *_: None)
    k = cache(driver, 10)
    mover.start(move(0), k, not_a_v(k))
    stream.num_refused_events = 1
    with pytest.raises(torch.OutOfMemoryError):
        mover.advance()
    assert mover.num_failures == 0 and mover.busy, "its blocks are not given back"
