"""Bench: what a part works with: the device, the limits measured on it, the time it has, and where its rows go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.limits import Limits
from benchmarks.gpu.models import TINY, ModelShelf, Shape
from benchmarks.gpu.table import NOT_MEASURED, Goal, Row

logger = logging.getLogger(__name__)


class NotHere(Exception):
    """A case cannot be measured on this machine, or with this version; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What measuring a case gave, if it is more than a number."""

    value: float
    note: str = ""
    floor: float | None = None
    """Takes the place of the one that was given."""
    details: Mapping[str, Any] = field(default_factory=dict)


class Bench:
    """One part's surroundings.

    Args:
        device: Where the device tier is.
        dry: Tiny sizes: shows that a part works, measures nothing of interest.
        limits: What the hardware allows.
        shelf: Where models come from.
        limit_s: The part's time, from now.
        emit: Gets each row as soon as it is there.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        dry: bool,
        limits: Limits,
        shelf: ModelShelf,
        limit_s: float,
        emit: Callable[[Row], None],
    ) -> None:
        self.device, self.dry, self.limits, self.shelf = device, dry, limits, shelf
        self._ends_s = time.monotonic() + limit_s
        self._emit = emit

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds that the part has left; below 0 after that."""
        return self._ends_s - time.monotonic()

    def name_of(self, shape: Shape) -> str:
        """Return what a shape is called; in a dry run there is only one."""
        return TINY.name if self.dry else shape.name

    def skip(self, case: str, unit: str, reason: str, goal: Goal | None = None) -> None:
        """Put a row into the table for a case that is not measured."""
        self._emit(Row(case=case, unit=unit, goal=goal, note=f"{NOT_MEASURED}: {reason}"))

    def fail(self, case: str, unit: str, error: Exception, goal: Goal | None = None) -> None:
        """Put a row into the table for a case that failed, and log why."""
        logger.error("%s failed", case, exc_info=error)
        first_line = (str(error).splitlines() or [""])[0]
        self._emit(Row(case=case, unit=unit, goal=goal, note=f"FAILED: {type(error).__name__}: {first_line}"))

    def take(
        self,
        case: str,
        unit: str,
        measure: Callable[[], float | Measured],
        *,
        floor: float | None = None,
        goal: Goal | None = None,
        needs_s: float = 0.0,
    ) -> float | None:
        """Measure a case and put its row into the table, whatever comes of it.

        Args:
            case: What it is called.
            unit: Of the value and its floor.
            measure: Returns the value; raises ``NotHere`` where there is none.
            floor: What the hardware allows.
            goal: What it is meant to be.
            needs_s: It is not begun with less time left.

        Returns:
            The value; None if there is none: out of time, not possible here, or failed (the row says which).
        """
        if self.left_s < needs_s or self.left_s <= 0:
            self._emit(Row(case=case, unit=unit, floor=floor, goal=goal, note=f"{NOT_MEASURED}: out of time"))
            return None
        try:
            result = measure()
        except NotHere as reason:
            self._emit(Row(case=case, unit=unit, floor=floor, goal=goal, note=f"{NOT_MEASURED}: {reason}"))
            return None
        except Exception as error:  # the other cases are still worth their time; the row and the exit status tell
            self.fail(case, unit, error, goal)
            return None
        measured = result if isinstance(result, Measured) else Measured(value=result)
        self._emit(
            Row(
                case=case, unit=unit, measured=measured.value, goal=goal, note=measured.note, details=measured.details,
                floor=floor if measured.floor is None else measured.floor,
            )
        )  # fmt: skip
        return measured.value
