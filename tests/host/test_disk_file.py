"""The disk tier's file: what was written is found, also by the next process; what is damaged is not."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from omniserve.host import disk_file
from omniserve.host.disk_file import PAGE_BYTES, DamagedBlock, DiskFile

BLOCK_BYTES = 5000
NUM_BYTES = 2 << 20
"""Size of about 250 slots, in several groups."""


def opened(folder: Path, *, fingerprint: str | None = "ab", num_bytes: int = NUM_BYTES) -> DiskFile:
    return DiskFile(folder, num_bytes=num_bytes, block_bytes=BLOCK_BYTES, fingerprint=fingerprint)


def block_of(key: bytes, size: int = BLOCK_BYTES) -> bytes:
    """The bytes that stand for the block of a key."""
    return random.Random(key).randbytes(size)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(file: DiskFile, slot: int, number: int) -> None:
    data = bytearray(block_of(key_of(number)))
    file.write(slot, key_of(number), in_parts(data))


def in_parts(data: bytearray) -> Sequence[memoryview]:
    view = memoryview(data)
    return [view[:1000], view[1000:1001], view[1001:]]


def get(file: DiskFile, slot: int, number: int) -> bytes:
    data = bytearray(BLOCK_BYTES)
    file.read(slot, key_of(number), in_parts(data))
    return bytes(data)


def test_blocks_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = opened(tmp_path, fingerprint=None)
    slots = random.Random(0).sample(range(file.num_slots), 100)
    for number, slot in enumerate(slots):
        put(file, slot, number)
    for number, slot in enumerate(slots):
        assert get(file, slot, number) == block_of(key_of(number))
    with pytest.raises(DamagedBlock):
        get(file, slots[3], 4)
    with pytest.raises(DamagedBlock):
        get(file, slots[3], 3)  # it was erased, as somebody took it for something else


def test_a_file_without_a_name_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path, fingerprint=None)
    put(file, 0, 0)
    assert file.path is None and list(tmp_path.iterdir()) == []
    file.close()
    file.close()

    open_file = os.open

    def without_tmpfile(path: object, flags: int, *args: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return open_file(path, flags, *args)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", without_tmpfile)
    file = opened(tmp_path, fingerprint=None)
    put(file, 1, 7)
    assert get(file, 1, 7) == block_of(key_of(7)) and list(tmp_path.iterdir()) == []


def test_the_file_stays_within_its_bytes_and_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    for num_bytes in (NUM_BYTES, NUM_BYTES + 12345, 2 * PAGE_BYTES + 2 * PAGE_BYTES):
        file = opened(folder, num_bytes=num_bytes)
        for slot in range(file.num_slots):
            put(file, slot, slot)
        assert file.path is not None
        status = file.path.stat()
        assert status.st_size <= num_bytes < status.st_size + file.slot_bytes + PAGE_BYTES
        assert stat.S_IMODE(status.st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        file.close()
    assert file.num_slots == 1


def test_the_next_process_finds_the_blocks_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    file = opened(tmp_path)
    slots = random.Random(1).sample(range(file.num_slots), 120)
    for number, slot in enumerate(slots):
        put(file, slot, number)
    put(file, slots[0], 500)  # in place of another
    file.erase(slots[1])
    file.close()
    again = opened(tmp_path)
    assert again.entries == [*((key_of(number), slots[number]) for number in range(2, 120)), (key_of(500), slots[0])]
    assert get(again, slots[7], 7) == block_of(key_of(7))
    put(again, slots[1], 501)
    again.close()
    assert opened(tmp_path).entries[-1] == (key_of(501), slots[1])


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_file_may_become_larger_or_smaller(tmp_path: Path, factor: float) -> None:
    file = opened(tmp_path)
    num_slots = file.num_slots
    for slot in range(num_slots):
        put(file, slot, slot)
    file.close()
    again = opened(tmp_path, num_bytes=int(factor * NUM_BYTES))
    assert again.entries == [(key_of(slot), slot) for slot in range(min(num_slots, again.num_slots))]
    for _, slot in again.entries:
        assert get(again, slot, slot) == block_of(key_of(slot))
    put(again, again.num_slots - 1, 9999)
    assert again.path is not None and again.path.stat().st_size <= factor * NUM_BYTES


def test_kv_of_another_model_is_no_hit(tmp_path: Path) -> None:
    file = opened(tmp_path)
    put(file, 0, 0)
    file.close()
    other = opened(tmp_path, fingerprint="cd")
    assert other.entries == []
    other.close()
    (tmp_path / "kv-ab.omniserve").rename(tmp_path / "kv-cd.omniserve")  # what is in it counts, not its name
    assert opened(tmp_path, fingerprint="cd").entries == []
    wider = DiskFile(tmp_path, num_bytes=NUM_BYTES, block_bytes=BLOCK_BYTES + 4, fingerprint="ef")
    wider.close()
    assert opened(tmp_path, fingerprint="ef").entries == [], "of another size"


def test_a_page_that_a_crash_has_emptied_begins_a_new_file(tmp_path: Path) -> None:
    file = opened(tmp_path)
    put(file, 3, 3)
    file.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(bytes(PAGE_BYTES) + path.read_bytes()[PAGE_BYTES:])
    again = opened(tmp_path)
    assert again.entries == []
    put(again, 3, 4)
    again.close()
    assert opened(tmp_path).entries == [(key_of(4), 3)]


def test_a_file_that_was_smaller_for_a_while_says_nothing_of_before(tmp_path: Path) -> None:
    file = opened(tmp_path)
    last = file.num_slots - 1
    smaller = opened(tmp_path / "other", num_bytes=NUM_BYTES - 20 * file.slot_bytes).num_slots
    assert smaller // 64 == last // 64, "it ends in the same group"
    put(file, last, 7)
    file.close()
    between = opened(tmp_path, num_bytes=NUM_BYTES - 20 * file.slot_bytes)
    assert between.entries == []
    put(between, 0, 7)
    between.close()
    again = opened(tmp_path)
    assert again.entries == [(key_of(7), 0)] and get(again, 0, 7) == block_of(key_of(7))


def test_files_that_are_not_used_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path).close()
    opened(tmp_path, fingerprint="cd").close()
    assert "kv-ab.omniserve has KV of other weights" in caplog.text


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "_LOCK_PATIENCE_S", 0.0)
    file = opened(tmp_path)
    with pytest.raises(BlockingIOError, match="another process uses"):
        opened(tmp_path)
    monkeypatch.setattr(disk_file, "_LOCK_PATIENCE_S", 60.0)
    threading.Timer(0.3, file.close).start()
    opened(tmp_path).close()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv-ab.omniserve"
    path.write_text("somebody's notes")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is no file of the disk tier: delete it"):
        opened(tmp_path)
    assert path.read_text() == "somebody's notes"
    path.unlink()
    opened(tmp_path).close()
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        opened(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="kv-ab"):
        opened(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_too_little_room_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least 16384"):
        opened(tmp_path, num_bytes=16383)
    with pytest.raises(OSError, match="give it less, or another folder"):
        opened(tmp_path, num_bytes=1 << 60)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_the_file_no_block_is_wrong(tmp_path: Path, seed: int) -> None:
    """Bytes flipped, parts overwritten with older ones, moved or cut off: a block is as it was written, or a miss."""
    rng = random.Random(seed)
    file = opened(tmp_path)
    for slot in range(file.num_slots):
        put(file, slot, slot)
    assert file.path is not None
    before = bytearray(file.path.read_bytes())
    for slot in rng.sample(range(file.num_slots), file.num_slots // 2):
        put(file, slot, 1000 + slot)
    file.close()
    data = bytearray(file.path.read_bytes())
    for _ in range(rng.randint(1, 200)):
        at, size = rng.randrange(PAGE_BYTES, len(data)), rng.choice([1, 32, 64, 4096, 20000])
        if (kind := rng.randrange(3)) == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + size] = before[at : at + size]
        else:
            other = rng.randrange(PAGE_BYTES, len(data))
            data[at : at + size] = data[other : other + len(data[at : at + size])]
    if seed % 2:
        del data[rng.randrange(PAGE_BYTES, len(data)) :]
    else:
        del data[len(before) :]
    file.path.write_bytes(data)
    again = opened(tmp_path)
    num_right = 0
    for key, slot in again.entries:
        got = bytearray(BLOCK_BYTES)
        try:
            again.read(slot, key, [memoryview(got)])
        except DamagedBlock:
            continue
        assert bytes(got) == block_of(key)
        num_right += 1
    left = again.entries
    assert len(left) == num_right, "what was damaged is erased"
    again.close()
    assert {key for key, _ in opened(tmp_path).entries} == {key for key, _ in left}


_WRITER = """
import itertools, random, sys
from pathlib import Path
from tests.host.test_disk_file import block_of, key_of, opened
file = opened(Path(sys.argv[1]))
rng = random.Random(int(sys.argv[2]))
for number in itertools.count(int(sys.argv[2]) * 1_000_000):
    data = bytearray(block_of(key_of(number)))
    file.write(rng.randrange(file.num_slots), key_of(number), [memoryview(data)])
    if number % 50 == 0:
        print(number, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_no_wrong_block(tmp_path: Path) -> None:
    rng, num_found = random.Random(0), 0
    for life in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(life)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(rng.randint(1, 12)):
            assert process.stdout.readline()
        time.sleep(rng.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        file = opened(tmp_path)
        for key, slot in file.entries:
            got = bytearray(BLOCK_BYTES)
            try:
                file.read(slot, key, [memoryview(got)])
            except DamagedBlock:
                continue
            assert bytes(got) == block_of(key)
            num_found += 1
        file.close()
    assert num_found > 100


def test_progress_is_told_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = opened(tmp_path)
    for slot in range(file.num_slots):
        put(file, slot, slot)
    file.close()
    monkeypatch.setattr(disk_file, "_TELL_EACH_S", 0.0)
    with caplog.at_level("INFO"):
        opened(tmp_path)
    assert "% of" in caplog.text and f"{file.num_slots} blocks found" in caplog.text
