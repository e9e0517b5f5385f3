"""How batches are kept and run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from omniserve.server.limits import MIB, Limits


def default_data_dir() -> Path:
    """Return where data lies by default, as the XDG base directory specification has it."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "omniserve"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Settings of the Files and Batch API."""

    data_dir: Path | None = None
    """Folder of files and batches, and of their database unless one is named (default: omniserve in $XDG_DATA_HOME,
    which is ~/.local/share). Servers that share a database share this folder, too."""
    database_url: str | None = None
    """Database of files and batches (default: SQLite in the data folder). With postgresql+psycopg://USER@HOST/NAME, not
    through a pooler, servers on several machines take batches, and one of them runs the lines of a model."""
    concurrency: int = Limits.batch_concurrency
    """Most lines of this server that are at the engine at a time."""
    max_lines: int = Limits.batch_max_lines
    """Most lines of one input file."""
    max_file_bytes: int = int(Limits.max_file_mib * MIB)
    """Largest file that is taken."""

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
        return default_data_dir() if self.data_dir is None else self.data_dir

    @property
    def url(self) -> URL:
        """URL of the database, in SQLAlchemy's form."""
        if self.database_url is not None:
            return make_url(self.database_url)
        return URL.create("sqlite", database=str(self.folder.absolute() / "omniserve.sqlite3"))
