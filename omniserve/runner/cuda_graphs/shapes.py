"""Buckets: the shapes to which steps are padded, and the time and memory that capturing them may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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


class Budget:
    """Counts the seconds and bytes of captures since it was made; each graph is expected to take what the last one did.

    So only the first graph of a kind, or one that takes more than the one before it, can exceed the budget. A limit of
    0 admits nothing. ``used_bytes`` returns how much of the device's memory is in use, by any process.
    """

    def __init__(
        self, *, limit_s: float, limit_bytes: int, used_bytes: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._limit_s, self._limit_bytes = limit_s, limit_bytes
        self._used_bytes, self._clock = used_bytes, clock
        self._began_s, self._bytes_before = clock(), used_bytes()
        self._last: dict[Hashable, tuple[float, int]] = {}

    def spent(self) -> tuple[float, int]:
        """Return the seconds and bytes that were spent so far."""
        return self._clock() - self._began_s, self._used_bytes() - self._bytes_before

    def admits(self, kind: Hashable) -> bool:
        """Tell whether another graph of a kind may be captured."""
        seconds, num_bytes = self.spent()
        last_s, last_bytes = self._last.get(kind, (0.0, 0))
        return seconds + last_s < self._limit_s and num_bytes + last_bytes < self._limit_bytes

    @contextmanager
    def spending(self, kind: Hashable) -> Iterator[None]:
        """Note what the capture of a graph inside this context takes."""
        seconds, num_bytes = self.spent()
        yield
        now_s, now_bytes = self.spent()
        self._last[kind] = now_s - seconds, now_bytes - num_bytes
