"""A benchmark's command line, a flag for each setting, and Markdown tables that are readable as text too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def argument_parser(doc: str | None, record: str | None = None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser whose description is a module's docstring.

    Args:
        doc: The docstring.
        record: Name of the benchmark, for the default of ``--record``; None: there is no such flag.
        **defaults: By name: a default, or a pair of it and a help text. A list takes several values, False is a switch.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, defaults)
    if record is not None:
        parser.add_argument("--record", type=Path, default=Path(f".cache/{record}.json"), help="file of the record")
    return parser


def add_sizes(parser: argparse.ArgumentParser, sizes: Mapping[str, Any], argument_default: Any = None) -> None:
    """Add a flag for each size (see ``argument_parser``); ``argparse.SUPPRESS``: what is not given has no value."""
    for name, given in sizes.items():
        default, text = given if isinstance(given, tuple) else (given, "")
        options: dict[str, Any] = {
            "help": f"{text} (default: {default})".strip(),
            "default": argument_default or default,
        }
        if default is False:
            options |= {"action": "store_true", "help": text}
        elif isinstance(default, list):
            options |= {"nargs": "+", "type": type(default[0])}
        else:
            options |= {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", **options)


def table(lines: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table whose head is the first line; with ``numbers`` all columns but the first are aligned right."""
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    rule = ["-" * (width - 1) + ":" if numbers and column else "-" * width for column, width in enumerate(widths)]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def table_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows of named cells; the head has every name, in the order in which they are first there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table([names, *([row.get(name, "") for name in names] for row in rows)], numbers=True)
