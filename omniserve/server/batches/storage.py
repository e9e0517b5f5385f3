"""What lasts: the database and the folder of files."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from omniserve.server.batches.database import Database, StorageError
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.leftovers import Leftovers
from omniserve.server.batches.progress import Progress
from omniserve.server.batches.rows import new_id
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.store import Store

logger = logging.getLogger(__name__)


class Storage:
    """Files and batches that outlive the process."""

    def __init__(self, database: Database, files: FileFolder) -> None:
        self.database = database
        self.files = files
        self.store = Store(database)
        self.progress = Progress(database)
        self.leftovers = Leftovers(database)

    @classmethod
    def open(cls, settings: BatchSettings) -> Storage:
        """Open the storage, and make it if it is not there.

        Raises:
            StorageError: The folder cannot be written, or the database is none or does not answer.
        """
        files = FileFolder(settings.folder / "files")
        return cls(Database(settings.url), files)

    def write_file(self, parts: Iterable[bytes]) -> tuple[str, int]:
        """Write a file that is to be known; return its id and size.

        It has to be made known, or discarded. If the process dies before, a sweep removes it an hour later.

        Raises:
            StorageError: Disk or database do not work; nothing was kept.
        """
        file_id = new_id("file-")
        self.leftovers.announce(file_id)
        return file_id, self.files.write(file_id, parts)

    def discard(self, *file_ids: str) -> None:
        """Remove files unless they were made known, soon if that does not work at once."""
        try:
            for file_id in file_ids:
                self.leftovers.discard(file_id)
            self.sweep()
        except StorageError as error:
            logger.warning("files: %s; what was not made known is removed later", error)

    def sweep(self) -> None:
        """Remove files that are nobody's.

        Raises:
            StorageError: Disk or database do not work; the next sweep tries again.
        """
        self.leftovers.sweep(self.files.remove)

    def close(self) -> None:
        """Close the database."""
        self.database.close()
