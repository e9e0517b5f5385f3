"""Curves: interpolation, monotony, and how few points Algorithm 1 needs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniserve.latency.fitting import explore
from omniserve.latency.omniserve import Curve, lower_envelope


def test_a_curve_is_straight_between_its_points_and_goes_on_behind_them() -> None:
    curve = Curve([(100, 11.0), (1, 1.1), (51, 6.1)])
    assert curve(51) == pytest.approx(6.1)
    assert curve(26) == pytest.approx(3.6)
    assert curve(200) == pytest.approx(21.0)
    assert curve(0) == 0
    assert curve(1) == pytest.approx(1.1)


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 1)), min_size=1, max_size=12, unique_by=lambda p: p[0]))
def test_a_curve_never_falls_whatever_was_measured(points: list[tuple[int, float]]) -> None:
    curve = Curve(points)
    values = [curve(rows) for rows in range(0, 1300, 7)]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(values))
    assert min(values[1:]) > 0


@pytest.mark.parametrize("points", [[], [(4, 1.0), (4, 2.0)]])
def test_a_curve_without_places_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="points at different places"):
        Curve(points)


def test_a_disturbed_measurement_is_lowered_to_the_next_one() -> None:
    assert lower_envelope([1.0, 30.0, 2.0, 2.5, 5.0]) == [1.0, 2.0, 2.0, 2.5, 5.0]
    assert Curve([(1, 1.0), (2, 30.0), (4, 2.0)])(2) == 2.0


def count_points(latency, high):
    asked: list[int] = []

    def measured(rows: int) -> float:
        asked.append(rows)
        return latency(rows)

    known = explore(measured, 1, high)
    assert sorted(asked) == sorted(known), "a place was measured twice"
    return known


@pytest.mark.parametrize("high", [256, 4096, 1 << 16])
def test_a_ladder_is_found_with_few_points_a_step(high: int) -> None:
    ladder = lambda rows: 1.0 + (rows > high // 3) + (rows > high // 2)  # noqa: E731
    known = count_points(ladder, high)
    assert len(known) <= 2 * (5 * high.bit_length() + 4)
    curve = Curve(known.items())
    for rows in range(1, high, max(1, high // 1000)):
        assert curve(rows) == pytest.approx(ladder(rows), rel=0.04)


def test_a_slope_needs_few_points_however_high_it_is() -> None:
    assert len(count_points(lambda rows: 1.0 + 0.5 * rows, 1 << 16)) <= 6


def test_exploring_stops_when_told() -> None:
    left = iter([True, True, False])
    known = explore(lambda rows: float(rows**2), 1, 4096, go_on=lambda: next(left))
    assert len(known) < 12


@pytest.mark.parametrize(("low", "high"), [(0, 5), (6, 5)])
def test_a_range_without_rows_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="1 <= low <= high"):
        explore(float, low, high)
