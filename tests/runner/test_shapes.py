"""Tests of the shape that a step is padded to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniserve.runner.cuda_graphs.shapes import (
    CHUNK_ROWS,
    DECODE_ROWS,
    ShapeTable,
    StepShape,
    capture_order,
    size,
    smallest_fitting,
)


def fitting(table: ShapeTable, rows: int, seats: int) -> StepShape | None:
    return smallest_fitting(sorted(table, key=size), rows, seats)


def test_smallest_shape_that_holds_a_step() -> None:
    table = ShapeTable.of(DECODE_ROWS, max_rows=100, max_seats=9)
    assert table.rows == (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100) and table.seats == (0, 4, 9)
    assert fitting(table, 5, 0) == StepShape(8, 0)
    assert fitting(table, 97, 5) == StepShape(100, 9)
    assert fitting(table, 0, 3) == StepShape(0, 4)
    assert fitting(table, 101, 0) is None and fitting(table, 1, 10) is None


def test_steps_of_chunks_have_a_smallest_shape() -> None:
    table = ShapeTable.of(CHUNK_ROWS, max_rows=64, max_seats=0)
    assert fitting(table, 2, 0) == StepShape(16, 0)
    assert ShapeTable.of(CHUNK_ROWS, max_rows=3, max_seats=0).rows == (3,)


@given(st.integers(1, 600), st.integers(0, 70), st.integers(0, 600), st.integers(0, 70))
def test_every_step_fits_a_shape_of_the_whole_table(max_rows: int, max_seats: int, rows: int, seats: int) -> None:
    table = ShapeTable.of(DECODE_ROWS, max_rows=max_rows, max_seats=max_seats)
    shape = fitting(table, rows, seats)
    shapes = list(table)
    assert len(set(shapes)) == len(shapes) and StepShape(0, 0) not in shapes
    fits = rows <= max_rows and seats <= max_seats
    assert (shape is not None) == fits
    if shape is not None:
        assert shape in shapes and shape.rows >= rows and shape.seats >= seats


@given(st.data())
def test_of_a_part_of_the_table_the_least_padding_is_chosen_or_none(data: st.DataObject) -> None:
    table = list(ShapeTable.of(DECODE_ROWS, max_rows=600, max_seats=64))
    some = data.draw(st.sets(st.sampled_from(table)))
    rows, seats = data.draw(st.integers(0, 650)), data.draw(st.integers(0, 70))
    shape = smallest_fitting(sorted(some, key=size), rows, seats)
    holding = [size(one) for one in some if one.rows >= rows and one.seats >= seats]
    if shape is None:
        assert not holding or min(holding) > max(256, 2 * (rows + seats)), "padding would cost more than it saves"
    else:
        assert shape in some and size(shape) == min(holding) <= max(256, 2 * (rows + seats))


def test_most_useful_shapes_come_first() -> None:
    decodes = ShapeTable.of(DECODE_ROWS, max_rows=4, max_seats=9)
    chunks = ShapeTable.of(CHUNK_ROWS, max_rows=64, max_seats=9)
    order = capture_order(decodes, chunks)
    assert sorted(order) == sorted([*((s, True) for s in decodes), *((s, False) for s in chunks)])
    assert set(order[:2]) == {(StepShape(4, 9), True), (StepShape(64, 9), False)}, "all others fit their memory"
    kinds = [(shape.seats in (0, 9), is_decode) for shape, is_decode in order[2:]]
    assert kinds == sorted(kinds, reverse=True), "no seats or all, decodes before chunks"
    first = [shape for shape, is_decode in order[2:] if is_decode and shape.seats == 0]
    assert [shape.rows for shape in first] == [1, 2, 4]


@pytest.mark.parametrize("name", ["rows", "seats"])
@pytest.mark.parametrize("usual", [DECODE_ROWS, CHUNK_ROWS])
def test_sizes_ascend(usual: tuple[int, ...], name: str) -> None:
    sizes = getattr(ShapeTable.of(usual, max_rows=512, max_seats=64), name)
    assert list(sizes) == sorted(set(sizes))
