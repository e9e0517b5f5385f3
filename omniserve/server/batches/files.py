"""The data folder, and files in it: complete or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from omniserve.server.batches.database import StorageError, storage_full

_UNFINISHED = ".unfinished-"
# Nothing writes a file for longer than this without writing to it.
_ABANDONED_AFTER_S = 3600.0
_PART_BYTES = 1 << 20
_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|afs|ceph|lustre|beegfs|gpfs|fuse\.(sshfs|ceph|glusterfs|rclone|s3fs)|glusterfs"
)
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The places where files and batches are kept."""

    data_dir: Path | None = None
    """Folder of files and batches, and of their database unless one is named (default: omniserve in $XDG_DATA_HOME,
    which is ~/.local/share). Servers that share a database share this folder, too."""
    database_url: str | None = None
    """Database of files and batches (default: SQLite in the data folder). With postgresql+psycopg://USER@HOST/NAME, not
    through a pooler, servers on several machines take batches, and one of them runs the lines of a model."""

    def __post_init__(self) -> None:
        if self.database_url is not None:
            try:
                make_url(self.database_url)
            except ArgumentError as error:
                raise ValueError(f"database_url: {error}") from None

    @property
    def is_explicit(self) -> bool:
        """True if the place of the data was chosen; False if it is the default."""
        return self.data_dir is not None or self.database_url is not None

    @property
    def folder(self) -> Path:
        """The data folder; the default is as the XDG base directory specification has it."""
        home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(home) / "omniserve" if self.data_dir is None else self.data_dir

    @property
    def url(self) -> URL:
        """URL of the database, in SQLAlchemy's form."""
        if self.database_url is not None:
            return make_url(self.database_url)
        return URL.create("sqlite", database=str(self.folder.absolute() / "omniserve.sqlite3"))


def refuse_network_folder(folder: Path) -> None:
    """Raise StorageError if a folder is on a network file system: SQLite and ``flock`` cannot be relied on there."""
    if not _MOUNTS.exists():
        return  # not Linux
    found, kind = Path("/"), ""
    for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
        fields, _, source = line.partition(" - ")
        mounted = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields.split()[4]))
        if folder.resolve().is_relative_to(mounted) and mounted.is_relative_to(found):
            found, kind = mounted, source.split()[0]
    if _NETWORK_FILE_SYSTEMS.fullmatch(kind):
        raise StorageError(
            f"{folder} is on a network file system ({kind}), where an SQLite database is not safe; choose a --data-dir "
            "on a local disk, or PostgreSQL with --database-url (then --data-dir may stay where it is)",
            status=500,
        )


class FileFolder:
    """A folder that holds files by id; made if it is not there.

    Its functions raise StorageError: to write if the disk is full or broken, to read if a file is not there, or is not
    as long as it was written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with storage_errors(folder):
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in new:
                _sync_folder(path.parent)
            probe = self._unfinished()
            probe.write_bytes(b"")
            probe.unlink()

    def write(self, file_id: str, parts: Iterable[bytes]) -> int:
        """Write a file; return its size. It is under its name only when all of it is on the disk."""
        unfinished = self._unfinished()
        with storage_errors(self._folder):
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
        """Return the path of a file; ``num_bytes`` is its size as it was written."""
        path = self._folder / file_id
        with _undamaged(path):
            found = path.stat().st_size
        if found != num_bytes:
            raise _damaged(path, f"it has {found} bytes, but was written with {num_bytes}")
        return path

    def read_part(self, file_id: str, start: int, length: int) -> bytes:
        """Return the bytes [start, start + length) of a file."""
        path = self._folder / file_id
        with _undamaged(path), path.open("rb") as file:
            file.seek(start)
            data = file.read(length)
        if len(data) != length:
            raise _damaged(path, f"it ends before byte {start + length}")
        return data

    def open(self, file_id: str) -> BinaryIO:
        """Open a file for reading."""
        path = self._folder / file_id
        with _undamaged(path):
            return path.open("rb")

    def remove(self, file_id: str) -> None:
        """Remove a file that no row names any more; it may be gone already."""
        with storage_errors(self._folder):
            (self._folder / file_id).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        """Remove half-written files of processes that died."""
        with storage_errors(self._folder):
            for path in self._folder.glob(f"{_UNFINISHED}*"):
                with suppress(FileNotFoundError):  # another server was faster
                    if path.stat().st_mtime < time.time() - _ABANDONED_AFTER_S:
                        path.unlink()

    def _unfinished(self) -> Path:
        # Not by process id: processes of several machines may share the folder.
        return self._folder / f"{_UNFINISHED}{uuid.uuid4().hex}"


def read_parts(file: BinaryIO) -> Iterator[bytes]:
    """Read a file from where it stands, a part at a time."""
    return iter(lambda: file.read(_PART_BYTES), b"")


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raise StorageError, which says what to do, for errors of writing below a folder."""
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


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """Raise StorageError for errors of reading a file."""
    try:
        yield
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None


def _damaged(path: Path, reason: str) -> StorageError:
    return StorageError(
        f"the stored file {path} is damaged or missing: {reason}; restore it from a copy, or upload it again",
        status=500,
        code="file_damaged",
    )
