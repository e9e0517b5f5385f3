"""The disk tier's threads: blocks of the pool go to the file and come back, each copy with one event."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omniserve.core.work import DiskCopy, HostEvent
from omniserve.host import disk as disk_module
from omniserve.host.disk import DiskTier
from omniserve.host.disk_file import DiskFile
from tests.events import WORK_DONE, WORK_FAILED, kind_of

NUM_BLOCKS = 30


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def pool_LBK2SH(request: pytest.FixtureRequest) -> Tensor:
    return torch.randn(3, NUM_BLOCKS, 2, 2, 8, 16).to(request.param)


@pytest.fixture
def tier(pool_LBK2SH: Tensor, tmp_path: Path) -> Iterator[DiskTier]:
    file = DiskFile(tmp_path, num_bytes=2 << 20, block_bytes=pool_LBK2SH[:, 0].nbytes)
    tier = DiskTier(file, (pool_LBK2SH,))
    yield tier
    tier.close()


def copy(
    move_id: int, blocks: list[int], slots: list[int], *, to_disk: bool, keys: list[bytes] | None = None
) -> DiskCopy:
    keys = keys or [slot.to_bytes(32, "little") for slot in slots]
    return DiskCopy(
        move_id=move_id, to_disk=to_disk, host_block_ids=tuple(blocks), slots=tuple(slots), keys=tuple(keys)
    )  # fmt: skip


def events_of(tier: DiskTier, count: int) -> dict[int, HostEvent]:
    """Wait for so many events; return them by move."""
    events: list[HostEvent] = []
    deadline_s = time.monotonic() + 60
    while len(events) < count:
        assert time.monotonic() < deadline_s, events
        events += tier.poll()
        time.sleep(0.001)
    assert len(events) == count and not tier.busy and not tier.poll()
    return {event.move_id: event for event in events}


@pytest.mark.parametrize("piece_bytes", [1, 4 << 20])
def test_blocks_come_back_into_other_blocks(
    pool_LBK2SH: Tensor, tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_PIECE_BYTES", piece_bytes)
    block_bytes = pool_LBK2SH[:, 0].nbytes
    tier = DiskTier(DiskFile(tmp_path, num_bytes=2 << 20, block_bytes=block_bytes), (pool_LBK2SH,))
    before = pool_LBK2SH.clone()
    blocks, slots = list(range(20)), [7 * slot % 41 for slot in range(20)]
    tier.start(copy(0, blocks[:11], slots[:11], to_disk=True))
    tier.start(copy(1, blocks[11:], slots[11:], to_disk=True))
    assert {kind_of(event) for event in events_of(tier, 2).values()} == {WORK_DONE}
    pool_LBK2SH[:, :20] = torch.nan
    targets = list(range(10, 30))
    tier.start(copy(2, targets, slots[::-1], to_disk=False))
    (event,) = events_of(tier, 1).values()
    assert kind_of(event) == WORK_DONE and event.seconds > 0 and not event.message
    assert torch.equal(pool_LBK2SH[:, 10:], before[:, :20].flip(1))
    stats = tier.stats()
    assert (stats.bytes_read, stats.bytes_written, stats.failures) == (20 * block_bytes, 20 * block_bytes, 0)
    tier.close()


def test_a_damaged_block_fails_its_copy_alone(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    tier.start(copy(0, [0, 1, 2], [0, 1, 2], to_disk=True))
    events_of(tier, 1)
    file = tier.file
    os.pwrite(file._descriptor, b"damaged", file._at(1) + 100)
    tier.start(copy(1, [3, 4], [0, 2], to_disk=False))
    tier.start(copy(2, [5, 6], [0, 1], to_disk=False))
    events = events_of(tier, 2)
    tier.start(copy(3, [7], [2], to_disk=False, keys=[b"x" * 32]))
    events |= events_of(tier, 1)
    assert kind_of(events[1]) == WORK_DONE
    assert kind_of(events[2]) == kind_of(events[3]) == WORK_FAILED
    assert "not as it was written" in events[2].message
    assert tier.stats().failures == 2
    tier.start(copy(4, [5], [1], to_disk=False))
    assert kind_of(events_of(tier, 1)[4]) == WORK_FAILED
    assert caplog.text.count("not as it was written") == 1, "it is logged once"


def test_a_disk_that_fails_loses_nothing(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    tier.start(copy(0, [0], [0], to_disk=True))
    event = events_of(tier, 1)[0]
    assert kind_of(event) == WORK_FAILED and "No space left" in event.message
    monkeypatch.setattr(os, "pwritev", lambda *_: 17)
    tier.start(copy(1, [0], [0], to_disk=True))
    assert "17 of" in events_of(tier, 1)[1].message
    monkeypatch.undo()
    tier.start(copy(2, [0], [0], to_disk=True))
    assert kind_of(events_of(tier, 1)[2]) == WORK_DONE


@pytest.mark.parametrize(
    ("blocks", "slots"), [([NUM_BLOCKS], [0]), ([-1], [0]), ([0], [1 << 20]), ([0, 1], [0]), ([], [])]
)
def test_a_bad_copy_is_refused(tier: DiskTier, blocks: list[int], slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ids must be in|as many slots"):
        tier.start(copy(0, blocks, slots, to_disk=True))
    assert not tier.busy


def test_a_tier_that_is_closed_fails_what_has_not_begun(
    pool_LBK2SH: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_PIECE_BYTES", 1)
    file = DiskFile(tmp_path, num_bytes=2 << 20, block_bytes=pool_LBK2SH[:, 0].nbytes)
    tier = DiskTier(file, (pool_LBK2SH,), num_threads=1)
    write = file.write
    monkeypatch.setattr(file, "write", lambda *args: (time.sleep(0.05), write(*args)))
    for number in range(4):
        tier.start(copy(number, [number], [number], to_disk=True))
    tier.close()
    tier.close()
    events = events_of(tier, 4)
    assert kind_of(events[3]) == WORK_FAILED and "closed" in events[3].message
    assert len({event.move_id for event in events.values()}) == 4
