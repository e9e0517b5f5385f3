"""The page of reproduced figures: a template whose tables and numbers come out of the record.

Its template, docs/pages/reproduction.md.jinja, names a number by experiment, row, column and figure, so that none can
be left over from an older record; one that the record lacks is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.paper.report import CELLS, markdown


class Findings:
    """Looks up numbers of a record's experiments; ValueError: the record has none there."""

    def __init__(self, experiments: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str]) -> None:
        self._experiments, self._sources = experiments, sources
        self.shown: set[str] = set()
        """Experiments whose table was asked for."""

    def table(self, name: str) -> str:
        """Return the table of an experiment, and below it where it is from."""
        self.shown.add(name)
        entry = self._entry(name)
        note = f"; {entry['note']}" if "note" in entry else ""
        return f"{markdown(entry, legend=False)}\n\n({self._sources[name]}{note})"

    def value(self, name: str, x: str, column: str, figure: str) -> float:
        """Return a number."""
        for row in self._entry(name)["rows"]:
            if row["x"] == x and row["column"] == column:
                if (value := row["figures"].get(figure)) is None:
                    raise ValueError(f"the record's {name}, {x}, {column} has no {figure}")
                return float(value)
        raise ValueError(f"the record's {name} has no {column} at {x}: run it anew")

    def ratio(self, name: str, x: str, column: str, other: str, figure: str) -> float:
        """Return what ``column`` has over what ``other`` has."""
        base = self.value(name, x, other, figure)
        if base == 0:
            raise ValueError(f"{figure} of {other} in {name} at {x} is 0: nothing can be a multiple of it")
        return self.value(name, x, column, figure) / base

    def values(self, names: str | Sequence[str], column: str, figure: str) -> list[float]:
        """Return the numbers of a column in all rows of one or more experiments."""
        return [self.value(name, x, column, figure) for name, x in self._rows(names, column)]

    def ratios(self, names: str | Sequence[str], column: str, other: str, figure: str) -> list[float]:
        """Return ``ratio`` in all rows."""
        return [self.ratio(name, x, column, other, figure) for name, x in self._rows(names, column)]

    def gains(self, names: str | Sequence[str], column: str, other: str, figure: str) -> list[float]:
        """Return what ``column`` has more than ``other``, in all rows."""
        rows = self._rows(names, column)
        return [self.value(name, x, column, figure) - self.value(name, x, other, figure) for name, x in rows]

    def _rows(self, names: str | Sequence[str], column: str) -> list[tuple[str, str]]:
        chosen = [names] if isinstance(names, str) else names
        return [(name, row["x"]) for name in chosen for row in self._entry(name)["rows"] if row["column"] == column]

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self._experiments:
            raise ValueError(f"the record has no experiment {name}: run it with --only {name}")
        return self._experiments[name]


def number(value: float, digits: int = 0, scale: float = 1.0) -> str:
    """Return a number with thousands separated."""
    text = f"{scale * value:,.{digits}f}"
    return text.removeprefix("-") if not any(digit in text for digit in "123456789") else text


def span(values: Iterable[float], digits: int = 0, scale: float = 1.0) -> str:
    """Return ``least to most``; one number if they look the same."""
    found = list(values)
    low, high = number(min(found), digits, scale), number(max(found), digits, scale)
    return low if low == high else f"{low} to {high}"


def verdict(*conditions: bool) -> str:
    """Return how a claim fared whose parts are these conditions."""
    return "holds" if all(conditions) else "in part" if any(conditions) else "**does not hold**"


def names_of(findings: Findings) -> dict[str, Any]:
    """Return what the page's template may ask."""
    return {
        "table": findings.table, "v": findings.value, "ratio": findings.ratio, "values": findings.values,
        "ratios": findings.ratios, "gains": findings.gains, "verdict": verdict,
        "cells": {name: says for name, (says, _) in CELLS.items()},
    }  # fmt: skip
