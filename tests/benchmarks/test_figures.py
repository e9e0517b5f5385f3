"""The papers' figures as curves: their points, what a stopped run goes on with, and their plots."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.common.record import read_row
from benchmarks.paper.figures import FIGURES
from benchmarks.reproduction import EXPERIMENTS, Unit

NAME = "omniserve-18-yi"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A figure of three points."""
    systems = ("omniserve", "omniserve, without BE")
    small = dataclasses.replace(FIGURES[NAME], xs=(1, 2, 5), leave_out=systems)
    monkeypatch.setitem(figures.FIGURES, NAME, small)
    return NAME


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_has_the_systems_of_its_experiment_at_each_value_of_its_axis(name: str) -> None:
    figure = FIGURES[name]
    base = EXPERIMENTS[figure.experiment]
    made = figure.experiment_of(base)
    columns = {case.column for case in base.cases if case.x == base.cases[0].x} - set(figure.leave_out)
    assert {column for column, _ in figure.also} <= columns and columns.isdisjoint(system for _, system in figure.also)
    columns |= {system for _, system in figure.also}
    assert len(figure.xs) >= 5 and sorted(figure.xs) == list(figure.xs)
    assert {(case.x, case.column) for case in made.cases} == {(f"{x:g}", each) for x in figure.xs for each in columns}
    of_one = [case for case in made.cases if case.column == made.cases[0].column]
    placed = [(case.machine, case.load) for case in of_one]
    assert all(placed.count(each) == 1 for each in placed), "no two points of a curve are the same"
    assert set(figure.leave_out) <= {case.column for case in base.cases}


def test_a_run_that_was_stopped_goes_on_and_a_finished_one_simulates_nothing(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "figures.json"
    arguments = [small, "--minutes", "0.1", "--seeds", "2", "--jobs", "1", "--record", str(record)]
    simulated: list[tuple[str, int]] = []
    monkeypatch.setattr(figures, "ProcessPoolExecutor", lambda jobs, mp_context: _InThisProcess(simulated, stop_at=3))
    with pytest.raises(KeyboardInterrupt):
        figures.main(arguments)
    assert len(read_row(record, small)["results"]["points"]) == 3
    monkeypatch.setattr(figures, "ProcessPoolExecutor", lambda jobs, mp_context: _InThisProcess(simulated))
    assert figures.main(arguments) == 0
    assert len(simulated) == len(set(simulated)) == 6
    points = read_row(record, small)["results"]["points"]
    assert {(point["x"], point["seed"]) for point in points} == {(x, seed) for x in "125" for seed in (0, 1)}
    assert figures.main(arguments) == 0 and len(simulated) == 6, "all points are there"
    assert "up to 3.13 times with four more hosts" in capsys.readouterr().out
    assert figures.main([small, "--minutes", "0.2", *arguments[3:]]) == 0 and len(simulated) == 12, "other minutes"

    drawn = figures.plot_record(record, [small], tmp_path / "plots")
    assert [path.name for path in drawn] == [f"{small}.png"] and drawn[0].read_bytes().startswith(b"\x89PNG")


class _InThisProcess:
    """A pool of processes that is none: it simulates as it is asked, and is interrupted after ``stop_at`` units."""

    def __init__(self, simulated: list[tuple[str, int]], stop_at: int | None = None) -> None:
        self._simulated, self._stop_at = simulated, stop_at

    def __enter__(self) -> _InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, run: object, units: list[Unit]) -> object:
        for number, unit in enumerate(units):
            if number == self._stop_at:
                raise KeyboardInterrupt
            self._simulated.append((unit.cases[0].x, unit.seed, unit.minutes))  # type: ignore[arg-type]
            yield unit.run()


def test_a_curve_has_the_median_and_the_ends_of_its_seeds() -> None:
    points = [
        {"x": x, "column": "a", "seed": seed, "figures": {"f": value}}
        for x, values in (("2", (1.0, 3.0, 8.0)), ("1", (5.0, None, 4.0)))
        for seed, value in enumerate(values)
    ]
    assert figures.curves(points, "f", 10.0) == {"a": [(1.0, 45.0, 40.0, 50.0), (2.0, 30.0, 10.0, 80.0)]}


def test_an_unknown_figure_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.parse_arguments(["omniserve-99"])
    assert "no figure is named omniserve-99" in capsys.readouterr().err
