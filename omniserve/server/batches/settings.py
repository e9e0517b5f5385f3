"""How batches are kept and run, and the flags that say so."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from omniserve.launch.flags import integer


def default_data_dir() -> Path:
    """Return where data lies by default, as the XDG base directory specification has it."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "omniserve"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Settings of the Files and Batch API."""

    data_dir: Path | None = None
    """Holds uploaded and written files, and the database unless ``database_url`` names another; None: the default."""
    database_url: str | None = None
    """A URL of SQLAlchemy; None is SQLite in ``data_dir``. Servers that share a database share ``data_dir``, too."""
    concurrency: int = 64
    """Most lines of this server that are at the engine at a time."""
    max_lines: int = 50_000
    """Of one input file."""
    max_file_bytes: int = 200 << 20

    @property
    def is_explicit(self) -> bool:
        """Whether the place of the data was chosen, rather than the default."""
        return self.data_dir is not None or self.database_url is not None

    @property
    def folder(self) -> Path:
        return default_data_dir() if self.data_dir is None else self.data_dir

    @property
    def url(self) -> URL:
        """Of the database.

        Raises:
            ArgumentError: ``database_url`` is no URL.
        """
        if self.database_url is not None:
            return make_url(self.database_url)
        return URL.create("sqlite", database=str(self.folder.absolute() / "omniserve.sqlite3"))


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; their defaults are BatchSettings'."""
    defaults = {field.name: field.default for field in fields(BatchSettings)}
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where files and batches are kept (default: omniserve in $XDG_DATA_HOME, which is ~/.local/share)",
    )
    parser.add_argument(
        "--database-url",
        type=_url,
        metavar="URL",
        help="database of files and batches (default: SQLite in --data-dir); with postgresql+psycopg://USER@HOST/NAME, "
        "not through a pooler, servers on several machines take batches, and one of them runs the lines of a model, if "
        "--data-dir is a folder that they share",
    )
    parser.add_argument(
        "--batch-concurrency",
        type=integer(1),
        default=defaults["concurrency"],
        help="most lines of batches in work at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-max-lines",
        type=integer(1),
        default=defaults["max_lines"],
        help="most lines of one input file (default: %(default)s)",
    )
    parser.add_argument(
        "--max-file-mib",
        type=integer(1),
        default=200,
        metavar="MIB",
        help="largest file that is taken, in MiB (default: %(default)s)",
    )


def _url(text: str) -> str:
    try:
        make_url(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def batch_settings(args: argparse.Namespace) -> BatchSettings:
    """Return the settings that the flags ask for."""
    return BatchSettings(
        data_dir=args.data_dir,
        database_url=args.database_url,
        concurrency=args.batch_concurrency,
        max_lines=args.batch_max_lines,
        max_file_bytes=args.max_file_mib << 20,
    )
