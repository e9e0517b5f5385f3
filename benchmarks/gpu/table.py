"""Rows of measurements, each beside its floor and its goal, and tables of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a row is meant to be."""

    at_most: float | None = None
    at_least: float | None = None
    """One of the two."""
    of: str = "ratio"
    """``ratio``, or ``measured``."""

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a goal is at_most or at_least something: give one of the two")
        if self.of not in ("ratio", "measured"):
            raise ValueError(f"a goal is one of ratio or measured, got {self.of!r}")

    def is_met(self, value: float) -> bool:
        """Return whether a value is as it is meant to be."""
        return value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0)

    def __str__(self) -> str:
        sign, bound = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        return f"{sign} {bound:g}" + (" x" if self.of == "ratio" else "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was measured, or was to be."""

    case: str
    unit: str
    measured: float | None = None
    """None: not measured; ``note`` says why."""
    floor: float | None = None
    """What the hardware allows, in the same unit: a time's floor, or a rate's ceiling."""
    goal: Goal | None = None
    note: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else belongs to it, for the record."""

    @property
    def ratio(self) -> float | None:
        """Measured over floor."""
        return self.measured / self.floor if self.measured is not None and self.floor else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None: there is none, or nothing was measured."""
        value = self.measured if self.goal is not None and self.goal.of == "measured" else self.ratio
        return None if self.goal is None or value is None else self.goal.is_met(value)

    def as_record(self) -> dict[str, Any]:
        """Return all of it, as JSON knows it; what is not finite becomes None."""
        record = dataclasses.asdict(self) | {"ratio": self.ratio, "met": self.met}
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}


def row_of(record: Mapping[str, Any]) -> Row:
    """Return the row that ``as_record`` was of."""
    values = {field.name: record[field.name] for field in dataclasses.fields(Row)}
    return Row(**values | {"goal": Goal(**record["goal"]) if record["goal"] is not None else None})


def markdown(rows: Sequence[Row]) -> str:
    """Return a Markdown table, also readable as it is."""
    lines = [["case", "measured", "floor", "ratio", "goal", "met", "note"]]
    for row in rows:
        met = "" if row.met is None else "yes" if row.met else "NO"
        lines.append([
            row.case, NOT_MEASURED if row.measured is None else f"{_short(row.measured)} {row.unit}",
            "" if row.floor is None else f"{_short(row.floor)} {row.unit}", _short(row.ratio),
            "" if row.goal is None else str(row.goal), met, row.note.replace("|", "/"),
        ])  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rules = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (lines[0], rules, *lines[1:])
    )


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
