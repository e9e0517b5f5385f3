"""Buckets: the shapes that steps are padded to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Decodes; 0: best-effort requests on the host tier may be all there are.
DECODE_ROWS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Longer chunks. Up to about 256 rows a step of a large model takes the time of reading its weights.
CHUNK_ROWS = (16, 64, 128, 256, 320, 384, 448, 512)
_SEATS = (0, 4, 16, 64)
_CHEAP_ROWS = 256
"""Up to so many rows, padding costs less than launching a step kernel by kernel: see ``CHUNK_ROWS``. Where rows are
more, a step that no captured shape holds without more than doubling them runs eagerly."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Rows of a step: T device rows, then P piggyback seats."""

    rows: int
    seats: int


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """Which shapes are to be captured.

    Every padding row costs its share of the dense halves, every graph memory and time at the start. Decode steps are
    bound by reading the weights, so that a padding of up to a half is cheap.
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
            max_rows: Most device rows of a step that is captured.
            max_seats: Most piggyback seats; 0: there is no host tier.
        """
        rows = (*(n for n in usual_rows if n < max_rows), max_rows)
        return cls(rows, (*(n for n in _SEATS if n < max_seats), max_seats))

    def __iter__(self) -> Iterator[StepShape]:
        """Yield all shapes."""
        for rows in self.rows:
            for seats in self.seats:
                if rows + seats:
                    yield StepShape(rows, seats)


def capture_order(decodes: ShapeTable, chunks: ShapeTable) -> list[tuple[StepShape, bool]]:
    """Return all shapes in the order in which they are captured, and whether each is one of decodes.

    Captures end when their budget is spent, so the most useful ones come first:

    * The largest of each table. All graphs share one memory pool, in which a capture uses again what those before it
      have let go: a small one fits into the blocks of a large one, and not the other way round. With the largest first
      the pool is as large as that one needs, and what follows adds little more than its output.
    * Few seats: none, for steps without the host tier, and as many as there may be, which hold any number of piggyback
      rows. What is between them only saves padding, which costs little while rows are few.
    * Decodes: most steps are decodes, one graph is all their work, and one capture is a graph; that of a step with
      chunks is a graph a layer, and attention remains to be launched between them.
    * Few rows: the shorter a step takes the device, the more launching it one by one costs.
    """

    def rank(entry: tuple[StepShape, bool]) -> tuple[bool, bool, bool, StepShape]:
        shape, is_decode = entry
        table = decodes if is_decode else chunks
        is_largest = shape == StepShape(table.rows[-1], table.seats[-1])
        return not is_largest, shape.seats not in (table.seats[0], table.seats[-1]), not is_decode, shape

    return sorted([*((shape, True) for shape in decodes), *((shape, False) for shape in chunks)], key=rank)


def smallest_fitting(shapes: Iterable[StepShape], num_rows: int, num_seats: int) -> StepShape | None:
    """Return the smallest shape that holds so many rows and seats; None: there is none, or it is far too large.

    Args:
        shapes: In ascending order of ``size``.
        num_rows: Device rows of a step.
        num_seats: Its seats.
    """
    for shape in shapes:
        if shape.rows >= num_rows and shape.seats >= num_seats:
            most = max(_CHEAP_ROWS, 2 * (num_rows + num_seats))
            return shape if size(shape) <= most else None
    return None


def size(shape: StepShape) -> int:
    """Return the rows of a step, seats included."""
    return shape.rows + shape.seats
