"""Files on the disk: complete or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from omniserve.server.batches.database import StorageError, storage_full

_UNFINISHED = ".unfinished-"
# Nothing writes a file for longer than this without writing to it.
_ABANDONED_AFTER_S = 3600.0


class FileFolder:
    """A folder that holds files by id.

    Args:
        folder: Made if it is not there.

    Raises:
        StorageError: Nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with told(folder):
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in new:
                _sync_folder(path.parent)
            probe = _unfinished_in(folder)
            probe.write_bytes(b"")
            probe.unlink()

    def write(self, file_id: str, parts: Iterable[bytes]) -> int:
        """Write a file; return its size. It is under its name only when all of it is on the disk.

        Raises:
            StorageError: The disk is full or broken; what was written is gone.
        """
        unfinished = _unfinished_in(self._folder)
        with told(self._folder):
            try:
                with unfinished.open("wb") as file:
                    for part in parts:
                        file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
                    num_bytes = file.tell()
                unfinished.rename(self._folder / file_id)
            finally:
                unfinished.unlink(missing_ok=True)
            _sync_folder(self._folder)
        return num_bytes

    def path(self, file_id: str, num_bytes: int) -> Path:
        """Return where a file lies.

        Raises:
            StorageError: It is not there, or is not as long as it was written.
        """
        path = self._folder / file_id
        try:
            found = path.stat().st_size
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from None
        if found != num_bytes:
            raise _damaged(path, f"it has {found} bytes, but was written with {num_bytes}")
        return path

    def read_part(self, file_id: str, start: int, length: int) -> bytes:
        """Return the bytes [start, start + length) of a file.

        Raises:
            StorageError: It is not there, or shorter.
        """
        with self.open(file_id) as file:
            try:
                file.seek(start)
                data = file.read(length)
            except OSError as error:
                raise _damaged(self._folder / file_id, error.strerror or str(error)) from None
        if len(data) != length:
            raise _damaged(self._folder / file_id, f"it ends before byte {start + length}")
        return data

    def open(self, file_id: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            StorageError: It is not there.
        """
        path = self._folder / file_id
        try:
            return path.open("rb")
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from None

    def remove(self, file_id: str) -> None:
        """Remove a file that no row names any more; it may be gone already."""
        with told(self._folder):
            (self._folder / file_id).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        """Remove what processes left behind that died while they wrote."""
        with told(self._folder):
            for path in self._folder.glob(f"{_UNFINISHED}*"):
                try:
                    abandoned = path.stat().st_mtime < time.time() - _ABANDONED_AFTER_S
                except FileNotFoundError:
                    continue  # another server was faster
                if abandoned:
                    path.unlink(missing_ok=True)


def _unfinished_in(folder: Path) -> Path:
    # Not by process id: processes of several machines may share the folder.
    return folder / f"{_UNFINISHED}{uuid.uuid4().hex}"


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Let errors of writing below a folder be StorageErrors that say what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{folder}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise storage_full(reason) from error
        raise StorageError(
            f"cannot write there: {reason}; make the folder writable or choose another --data-dir (or TMPDIR, where "
            "uploads come in)",
            status=503,
            code="storage_error",
        ) from error


def _damaged(path: Path, reason: str) -> StorageError:
    return StorageError(
        f"the stored file {path} is damaged or missing: {reason}; restore it from a copy, or upload it again",
        status=500,
        code="file_damaged",
    )
