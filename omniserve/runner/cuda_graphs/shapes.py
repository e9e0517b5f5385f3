"""Buckets: the shapes to which steps are padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# For decodes. There may be 0 rows, if all requests are on the host tier.
DECODE_ROWS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# For longer chunks. Up to about 256 rows a step of a large model takes the time of reading its weights.
CHUNK_ROWS = (16, 64, 128, 256, 320, 384, 448, 512)
_SEATS = (0, 4, 16, 64)
_CHEAP_ROWS = 256
"""Up to this number of rows padding costs less than launching a step kernel by kernel. Beyond it, a step runs eagerly
if every captured shape that holds it has more than twice its rows."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Rows of a step: T device rows, then P piggyback seats."""

    rows: int
    seats: int


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """The shapes that are to be captured.

    Every padding row costs its share of the dense halves, every graph costs memory and time at the start. Decode steps
    are bound by reading the weights, so padding of up to a half is cheap.
    """

    rows: tuple[int, ...]
    """Device rows, ascending."""
    seats: tuple[int, ...]
    """Piggyback seats, ascending from 0."""

    @classmethod
    def of(cls, usual_rows: Sequence[int], *, max_rows: int, max_seats: int) -> ShapeTable:
        """Return the table of the usual rows (``DECODE_ROWS`` or ``CHUNK_ROWS``) and seats up to these maxima.

        ``max_seats`` is 0 without a host tier.
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

    Capturing ends when its budget is spent, so the most useful shapes come first:

    * The largest of each table. All graphs share one memory pool, in which a capture reuses the memory that earlier
      ones have freed: a small one fits into the blocks of a large one, and not the other way round. With the largest
      first, the pool gets the size that this one needs, and each later capture adds little more than its output.
    * No seats, for steps without the host tier, and all seats, which hold any number of piggyback rows. Numbers of
      seats between these only save padding, which costs little while rows are few.
    * Decodes. Most steps are decodes, and a single graph holds all their work; a step with chunks has a graph for each
      layer, and its attention is still launched between them.
    * Few rows. The shorter a step is on the device, the larger is the share of launching its kernels one by one.
    """

    def rank(entry: tuple[StepShape, bool]) -> tuple[bool, bool, bool, StepShape]:
        shape, is_decode = entry
        table = decodes if is_decode else chunks
        is_largest = shape == StepShape(table.rows[-1], table.seats[-1])
        return not is_largest, shape.seats not in (table.seats[0], table.seats[-1]), not is_decode, shape

    return sorted([*((shape, True) for shape in decodes), *((shape, False) for shape in chunks)], key=rank)


def smallest_fitting(shapes: Iterable[StepShape], num_rows: int, num_seats: int) -> StepShape | None:
    """Return the first shape that holds the rows and the seats of a step; None if there is none, or it is too large.

    ``shapes`` are in ascending order of ``size``.
    """
    for shape in shapes:
        if shape.rows >= num_rows and shape.seats >= num_seats:
            most = max(_CHEAP_ROWS, 2 * (num_rows + num_seats))
            return shape if size(shape) <= most else None
    return None


def size(shape: StepShape) -> int:
    """Return the number of rows of a shape, seats included."""
    return shape.rows + shape.seats
