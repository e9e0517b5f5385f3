"""Markdown tables that are readable as text too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
