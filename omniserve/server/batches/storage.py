"""What lasts: the database and the folder of files."""

from __future__ import annotations

from dataclasses import dataclass

from omniserve.server.batches.database import Database
from omniserve.server.batches.files import FileFolder
from omniserve.server.batches.settings import BatchSettings
from omniserve.server.batches.store import Store


@dataclass(frozen=True, slots=True)
class Storage:
    """Files and batches that outlive the process."""

    database: Database
    store: Store
    files: FileFolder

    @classmethod
    def open(cls, settings: BatchSettings) -> Storage:
        """Open the storage, and make it if it is not there.

        Raises:
            StorageError: The folder cannot be written, or the database is none or does not answer.
        """
        files = FileFolder(settings.folder / "files")
        database = Database(settings.url)
        return cls(database, Store(database), files)

    def close(self) -> None:
        """Close the database."""
        self.database.close()
