"""Buckets: the shapes that steps are padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Decodes; 0: best-effort requests on the host tier may be all there are.
DECODE_ROWS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Longer chunks. Up to about 256 rows a step of a large model takes the time of reading its weights.
CHUNK_ROWS = (16, 64, 128, 256, 320, 384, 448, 512)
_SEATS = (0, 4, 16, 64)


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Rows of a step: T device rows, then P piggyback seats."""

    rows: int
    seats: int


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """Which shapes are recorded.

    Every padding row costs its share of the dense halves, every recording memory and time at the start. Decode steps
    are bound by reading the weights, so that a padding of up to a half is cheap.
    """

    rows: tuple[int, ...]
    """Device rows, ascending."""
    seats: tuple[int, ...]
    """Piggyback seats, ascending from 0."""

    @classmethod
    def of(cls, usual_rows: Sequence[int], *, max_rows: int, max_seats: int) -> ShapeTable:
        """Return the usual table.

        Args:
            usual_rows: ``DECODE_ROWS`` or ``CHUNK_ROWS``, as far as they are needed.
            max_rows: Most device rows of a step that is recorded.
            max_seats: Most piggyback seats; 0: there is no host tier.
        """
        rows = (*(n for n in usual_rows if n < max_rows), max_rows)
        return cls(rows, (*(n for n in _SEATS if n < max_seats), max_seats))

    def fitting(self, num_rows: int, num_seats: int) -> StepShape | None:
        """Return the smallest shape that holds so many rows and seats; None: there is none."""
        rows, seats = _at_least(self.rows, num_rows), _at_least(self.seats, num_seats)
        return StepShape(rows, seats) if rows is not None and seats is not None and rows + seats else None

    def __iter__(self) -> Iterator[StepShape]:
        """Yield all shapes, largest first: a recording may then use the memory of those before it."""
        for rows in reversed(self.rows):
            for seats in reversed(self.seats):
                if rows + seats:
                    yield StepShape(rows, seats)


def _at_least(sizes: Sequence[int], wanted: int) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
