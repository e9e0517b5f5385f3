"""Loads at a rate, and the highest rate."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from omniserve.simulate.load import TraceRequest
from omniserve.simulate.scenario import Scenario, highest_rate, parse_arrivals, parse_lengths


@pytest.mark.parametrize("limit", [0.013, 0.8, 1.0, 3.7, 900.0])
def test_the_highest_rate_is_found_to_five_percent(limit: float) -> None:
    asked: list[float] = []

    def meets(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = highest_rate(meets, 1.0, least=0.005)
    assert 0.95 * limit <= found <= limit
    assert found in asked and len(asked) < 25


def test_no_rate_or_every_rate() -> None:
    assert highest_rate(lambda rate: False, 1.0, least=0.1) == 0.0
    with pytest.raises(ValueError, match="begin with a higher rate"):
        highest_rate(lambda rate: True, 1.0, least=0.1)


def test_a_trace_is_stretched_and_repeated() -> None:
    trace = (TraceRequest(0.0, 1, 10), TraceRequest(3.0, 2, 20), TraceRequest(8.0, 3, 30), TraceRequest(10.0, 4, 40))
    scenario = Scenario(ls_trace=trace)
    assert scenario.trace_rate == pytest.approx(0.4)
    load = scenario.load(0.8, 12.0, seed=0)  # twice as fast: a pass takes 5 s
    assert [(r.arrival_s, r.input_tokens) for r in load.latency_sensitive] == [
        (0, 1), (1.5, 2), (4, 3), (5, 4), (5, 1), (6.5, 2), (9, 3), (10, 4), (10, 1), (11.5, 2),
    ]  # fmt: skip
    assert load.duration_s == 12.0 and not load.best_effort


def test_best_effort_work_does_not_change_who_else_comes() -> None:
    scenario = Scenario(ls_lengths=parse_lengths("lognormal:50:20"), be_rate=2.0, be_lengths=parse_lengths("10:3"))
    both, alone = (scenario.load(1.0, 100.0, seed=5, best_effort=flag) for flag in (True, False))
    assert both.latency_sensitive == alone.latency_sensitive
    assert 150 < len(both.best_effort) < 250 and not alone.best_effort
    assert scenario.load(1.0, 100.0, seed=6).latency_sensitive != alone.latency_sensitive
    pile = Scenario(ls_lengths=parse_lengths("5:5"), backlog=7, be_lengths=parse_lengths("10:3"), warm_up=0.25)
    load = pile.load(1.0, 100.0, seed=0)
    assert (load.backlog, load.warm_up_s) == (7, 25.0) and load.best_effort


def test_a_square_wave_has_the_mean_rate() -> None:
    times = parse_arrivals("square:4:50")(2.0, 5000.0, random.Random(0))
    assert len(times) == pytest.approx(10_000, rel=0.04)
    low = sum(time % 50 < 25 for time in times)
    assert (len(times) - low) / low == pytest.approx(4, rel=0.1)
    assert len(parse_arrivals("gamma:2")(2.0, 1000.0, random.Random(0))) == pytest.approx(2000, rel=0.15)


@pytest.mark.parametrize("text", ["poison", "gamma", "gamma:0", "gamma:x", "square:4", "square:0.5:60", "square:4:0"])
def test_unknown_arrivals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="arrivals must be poisson"):
        parse_arrivals(text)


@pytest.mark.parametrize("text", ["512", "a:b", "lognormal:1", "nowhere.csv", "512:0", "lognormal:x:2"])
def test_unknown_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lengths"):
        parse_lengths(text)


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n7,3\n")
    assert parse_lengths(str(path))(random.Random(0)) == (7, 3)
