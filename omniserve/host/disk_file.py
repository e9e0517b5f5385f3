"""DiskFile: the file of the disk tier. Its slots hold KV blocks, each with its key and a checksum.

Layout: a page of 4 KiB that says what the file is, then groups. A group is a page of 64 entries and the 64 slots that
these describe. Groups do not move when the file becomes larger or smaller. To open it, only the pages of entries are
read. An entry is written behind its block, and erased before the block is overwritten. A crash can leave an entry and
a block that do not belong together; the checksum, of key and block, tells that when the block is read.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import stat
import struct
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

Buffer = memoryview
PAGE_BYTES = 4096
_ENTRY = struct.Struct("<32sIQ")
"""Key; CRC-32 of key and block; when it was written, as the number of writes before it."""
_CHECK = struct.Struct("<I")
"""CRC-32 of the entry."""
_ENTRY_BYTES = 64
_GROUP = PAGE_BYTES // _ENTRY_BYTES
_FORMAT = "omniserve-kv 1"
_TELL_EACH_S = 2.0
_LOCK_PATIENCE_S = 3.0


class DamagedBlock(RuntimeError):
    """A slot does not hold the block that it should."""


class DiskFile:
    """A file of fixed slots. Several threads may use it, each another slot.

    Args:
        folder: Is made, for its owner only, if it is not there.
        num_bytes: The file does not become larger.
        block_bytes: Bytes of a block.
        fingerprint: Says which KV is in the file, as hexadecimal digits, and names it. A file that is there is opened
            again, and what is whole in it is found. None: the file has no name, and is gone when the process ends,
            however it does.

    Raises:
        ValueError: There is no room for a slot, or the file is no file of the disk tier.
        PermissionError: Other users may read the file, or it belongs to one of them.
        BlockingIOError: Another process uses the file.
        OSError: The folder or the file cannot be made, or the disk has less room than ``num_bytes``.
    """

    def __init__(self, folder: Path, *, num_bytes: int, block_bytes: int, fingerprint: str | None = None) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self._group_bytes = PAGE_BYTES + _GROUP * self.slot_bytes
        num_groups, rest = divmod(num_bytes - PAGE_BYTES, self._group_bytes)
        self.num_slots = max(0, num_groups * _GROUP + max(0, (rest - PAGE_BYTES) // self.slot_bytes))
        if self.num_slots < 1:
            least = 2 * PAGE_BYTES + self.slot_bytes
            raise ValueError(f"the disk tier has {num_bytes} bytes, less than a KV block takes: give at least {least}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"kv-{fingerprint}.omniserve" if fingerprint is not None else None
        """Path of the file; None: the file has no name."""
        self._checksums: dict[int, tuple[bytes, int]] = {}
        """Slot -> key and checksum of the block that it holds."""
        self._writes = itertools.count()
        self._descriptor = _opened(self.path) if self.path is not None else _unnamed(folder)
        self._end = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._tell_of_others(folder)
            self._check_room(folder, num_bytes)
            self._load(json.dumps({"format": _FORMAT, "fingerprint": fingerprint, "block_bytes": block_bytes}).encode())
        except BaseException:
            self.close()
            raise

    @property
    def entries(self) -> list[tuple[bytes, int]]:
        """Keys and slots of the blocks in the file, the last written last."""
        return [(key, slot) for slot, (key, _) in self._checksums.items()]

    def write(self, slot: int, key: bytes, parts: Sequence[Buffer]) -> None:
        """Write a block, which is given in parts.

        Raises:
            OSError: The disk is full, or fails. The slot is empty then, or damaged.
        """
        self.erase(slot)
        written = os.pwritev(self._descriptor, parts, self._at(slot))
        if written != self.block_bytes:
            raise OSError(errno.ENOSPC, f"{written} of {self.block_bytes} bytes were written")
        checksum = _checksum(key, parts)
        entry = _ENTRY.pack(key, checksum, next(self._writes))
        os.pwrite(self._descriptor, entry + _CHECK.pack(zlib.crc32(entry)), self._entry_at(slot))
        self._checksums[slot] = key, checksum

    def read(self, slot: int, key: bytes, parts: Sequence[Buffer]) -> None:
        """Read the block of this key into buffers.

        Raises:
            DamagedBlock: The slot does not hold it as it was written; the entry is erased.
            OSError: The disk fails.
        """
        num_read = os.preadv(self._descriptor, parts, self._at(slot))
        known, checksum = self._checksums.get(slot, (b"", -1))
        if known != key or num_read != self.block_bytes or _checksum(key, parts) != checksum:
            self.erase(slot)
            raise DamagedBlock("a block in the disk tier's file is not as it was written, and is not used")

    def erase(self, slot: int) -> None:
        """Forget what a slot holds."""
        if self._checksums.pop(slot, None) is not None:
            os.pwrite(self._descriptor, bytes(_ENTRY_BYTES), self._entry_at(slot))

    def close(self) -> None:
        """Close the file; another process may use it then. A second call does nothing."""
        self._end()

    def _at(self, slot: int) -> int:
        group, index = divmod(slot, _GROUP)
        return PAGE_BYTES + group * self._group_bytes + PAGE_BYTES + index * self.slot_bytes

    def _entry_at(self, slot: int) -> int:
        group, index = divmod(slot, _GROUP)
        return PAGE_BYTES + group * self._group_bytes + index * _ENTRY_BYTES

    def _tell_of_others(self, folder: Path) -> None:
        for path in folder.glob("kv-*.omniserve"):
            if self.path is not None and path != self.path:
                logger.warning(
                    "disk tier: %s has KV of other weights, or was made with other settings or another version: delete "
                    "it if it is not used any more",
                    path,
                )

    def _check_room(self, folder: Path, num_bytes: int) -> None:
        status, room = os.fstat(self._descriptor), os.fstatvfs(self._descriptor)
        missing = num_bytes - status.st_blocks * 512 - room.f_bavail * room.f_frsize
        if missing > 0:
            raise OSError(
                errno.ENOSPC,
                f"the disk of {folder} has {missing} bytes less than the {num_bytes} of the disk tier: give it less, "
                "or another folder",
            )

    def _load(self, header: bytes) -> None:
        """Find the blocks of an earlier run; begin a new file if there is none, or it says something else of itself."""
        page, size = os.pread(self._descriptor, PAGE_BYTES, 0), os.fstat(self._descriptor).st_size
        if any(page) and not page.startswith(b'{"format": "omniserve-kv '):  # a crash may leave a page of zeros
            raise ValueError(f"{self.path} is no file of the disk tier: delete it, or give another folder")
        if page.rstrip(b"\0") != header:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, header.ljust(PAGE_BYTES, b"\0"), 0)
            return
        last = self._at(self.num_slots - 1) + self.slot_bytes
        if size > last:
            os.ftruncate(self._descriptor, last)
            num_cut = -self.num_slots % _GROUP
            os.pwrite(
                self._descriptor, bytes(num_cut * _ENTRY_BYTES), self._entry_at(self.num_slots - 1) + _ENTRY_BYTES
            )
        found: dict[bytes, tuple[int, int, int]] = {}
        began_s = told_s = time.monotonic()
        for first in range(0, self.num_slots, _GROUP):
            entries = os.pread(self._descriptor, PAGE_BYTES, self._entry_at(first))
            if not entries:
                break
            for slot in range(first, min(first + _GROUP, self.num_slots)):
                entry = entries[(slot - first) * _ENTRY_BYTES :][: _ENTRY.size + _CHECK.size]
                if len(entry) < _ENTRY.size + _CHECK.size or not any(entry):
                    continue
                (check,) = _CHECK.unpack_from(entry, _ENTRY.size)
                if zlib.crc32(entry[: _ENTRY.size]) == check:
                    key, checksum, order = _ENTRY.unpack_from(entry)
                    if key not in found or found[key][0] < order:
                        found[key] = order, slot, checksum
            if time.monotonic() - told_s > _TELL_EACH_S:
                told_s = time.monotonic()
                logger.info("disk tier: %.0f %% of %s are read", 100 * first / self.num_slots, self.path)
        for key, (order, slot, checksum) in sorted(found.items(), key=lambda item: item[1]):
            self._checksums[slot] = key, checksum
            self._writes = itertools.count(order + 1)
        logger.info("disk tier: %d blocks found in %s, %.1f s", len(found), self.path, time.monotonic() - began_s)


def _checksum(key: bytes, parts: Iterable[Buffer]) -> int:
    checksum = zlib.crc32(key)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _opened(path: Path) -> int:
    """Open a file that its owner alone may read, and lock it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(
                f"{path} holds what requests said, but others than this process's user may read it or own it: "
                f"chmod 600 it, or delete it"
            )
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file: delete it, or give another folder")
        _lock(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    """Lock a file, which a process that ends may still hold for a moment."""
    deadline_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                message = f"another process uses {path}: give each a folder of its own"
                raise BlockingIOError(errno.EWOULDBLOCK, message) from error
        time.sleep(0.1)


def _unnamed(folder: Path) -> int:
    """Open a file that has no name, or loses it at once where the file system needs one."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    descriptor, name = tempfile.mkstemp(prefix="kv-", dir=folder)
    os.unlink(name)
    return descriptor
