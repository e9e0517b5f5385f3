"""Which shape a step is padded to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniserve.graphs.shapes import CHUNK_ROWS, DECODE_ROWS, ShapeTable, StepShape


def test_smallest_shape_that_holds_a_step() -> None:
    table = ShapeTable.of(DECODE_ROWS, max_rows=100, max_seats=9)
    assert table.rows == (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100) and table.seats == (0, 4, 9)
    assert table.fitting(5, 0) == StepShape(8, 0)
    assert table.fitting(97, 5) == StepShape(100, 9)
    assert table.fitting(0, 3) == StepShape(0, 4)
    assert table.fitting(101, 0) is None and table.fitting(1, 10) is None
    assert table.fitting(0, 0) is None, "nothing to run"


def test_steps_of_chunks_have_a_smallest_shape() -> None:
    table = ShapeTable.of(CHUNK_ROWS, max_rows=64, max_seats=0)
    assert table.fitting(2, 0) == StepShape(16, 0)
    assert ShapeTable.of(CHUNK_ROWS, max_rows=3, max_seats=0).rows == (3,)


@given(st.integers(1, 600), st.integers(0, 70), st.integers(0, 600), st.integers(0, 70))
def test_every_fitting_shape_is_recorded(max_rows: int, max_seats: int, rows: int, seats: int) -> None:
    table = ShapeTable.of(DECODE_ROWS, max_rows=max_rows, max_seats=max_seats)
    shape = table.fitting(rows, seats)
    fits = rows <= max_rows and seats <= max_seats and rows + seats > 0
    assert (shape is not None) == fits
    shapes = list(table)
    assert len(set(shapes)) == len(shapes)
    if shape is not None:
        assert shape in shapes and shape.rows >= rows and shape.seats >= seats


def test_largest_shapes_are_recorded_first() -> None:
    shapes = list(ShapeTable.of(DECODE_ROWS, max_rows=4, max_seats=2))
    assert shapes[0] == StepShape(4, 2)
    assert shapes == sorted(shapes, reverse=True)
    assert StepShape(0, 0) not in shapes


@pytest.mark.parametrize("name", ["rows", "seats"])
@pytest.mark.parametrize("usual", [DECODE_ROWS, CHUNK_ROWS])
def test_sizes_ascend(usual: tuple[int, ...], name: str) -> None:
    sizes = getattr(ShapeTable.of(usual, max_rows=512, max_seats=64), name)
    assert list(sizes) == sorted(set(sizes))
