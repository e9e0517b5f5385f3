"""Arrival processes, lengths and traces."""

from __future__ import annotations

import gzip
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from omniserve.simulate.load import (
    TraceRequest,
    fixed_lengths,
    gamma,
    lognormal_lengths,
    poisson,
    read_lengths,
    read_trace,
    requests,
    sampled_lengths,
    square_wave,
)
from omniserve.simulate.scenario import Scenario


def test_the_same_seed_gives_the_same_load() -> None:
    def load(seed: int) -> list[TraceRequest]:
        rng = random.Random(seed)
        return requests(gamma(3, 2.0, 50, rng), lognormal_lengths(100, 20), rng)

    assert load(1) == load(1) != load(2)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_has_the_rate_and_the_variation_asked_for(cv: float) -> None:
    times = gamma(5, cv, 8000, random.Random(0))
    assert times == sorted(times) and 0 <= times[0] and times[-1] < 8000
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.08)


def test_square_wave_is_low_then_high() -> None:
    times = square_wave(1, 9, 100, 2000, random.Random(0))
    low = sum(time % 100 < 50 for time in times)
    assert times == sorted(times)
    assert low == pytest.approx(1000, rel=0.1)
    assert len(times) - low == pytest.approx(9000, rel=0.1)


def test_a_last_half_period_is_cut() -> None:
    times = square_wave(0, 100, 10, 7, random.Random(0))
    assert min(times) >= 5 and max(times) < 7 and len(times) > 100


def test_no_rate_no_arrivals() -> None:
    assert poisson(0, 100, random.Random(0)) == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda rng: poisson(-1, 1, rng), "rate"),
        (lambda rng: poisson(1, float("inf"), rng), "duration_s"),
        (lambda rng: gamma(1, 0, 1, rng), "cv"),
        (lambda rng: square_wave(1, 2, 0, 1, rng), "period_s"),
        (lambda rng: fixed_lengths(0, 1), "1 token"),
        (lambda rng: lognormal_lengths(0, 1), "1 token"),
        (lambda rng: lognormal_lengths(1, 1, sigma=-1), "sigma"),
        (lambda rng: sampled_lengths([]), "no lengths"),
    ],
)
def test_what_is_out_of_range_is_named(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call(random.Random(0))  # type: ignore[operator]


def test_lengths_stay_within_their_limits() -> None:
    rng = random.Random(0)
    drawn = [lognormal_lengths(100, 50, sigma=2, max_input=300, max_output=60)(rng) for _ in range(2000)]
    assert {min(a for a, _ in drawn), max(a for a, _ in drawn), max(b for _, b in drawn)} <= {*range(1, 5), 300, 60}
    assert statistics.median(a for a, _ in drawn) == pytest.approx(100, rel=0.15)
    assert fixed_lengths(7, 3)(rng) == (7, 3)
    assert {sampled_lengths([(1, 2), (3, 4)])(rng) for _ in range(50)} == {(1, 2), (3, 4)}


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    text = "input_tokens,arrival_s,output_tokens,note\n10,2.5,3,x\n20,0,4,y\n\n"
    plain, packed = tmp_path / "a.csv", tmp_path / "a.csv.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    expected = [TraceRequest(0.0, 20, 4), TraceRequest(2.5, 10, 3)]
    assert read_trace(plain) == read_trace(packed) == expected
    assert read_lengths(plain) == [(10, 3), (20, 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: the header must name"),
        ("arrival_s,input_tokens\n0,1\n", "missing: output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "no rows"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n1,x,1\n", "line 3: input_tokens must be a number, got 'x'"),
        ("arrival_s,input_tokens,output_tokens\n0,1,0\n", "line 2: output_tokens must be a whole number >= 1"),
        ("arrival_s,input_tokens,output_tokens\n0,1.5,1\n", "line 2: input_tokens must be a whole number"),
        ("arrival_s,input_tokens,output_tokens\n-1,1,1\n", "line 2: arrival_s must be >= 0"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", "line 2: arrival_s must be finite"),
        ("arrival_s,input_tokens,output_tokens\n1,1\n", "line 2: 2 fields where the header has 3"),
    ],
)
def test_a_bad_trace_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_a_trace_says_which_prompts_begin_alike(tmp_path: Path) -> None:
    table, lines = tmp_path / "a.csv", tmp_path / "a.jsonl"
    table.write_text("arrival_s,input_tokens,output_tokens,hash_ids\n2.5,10,3,7 8\n0,20,4,\n")
    lines.write_text(
        '{"timestamp": 2500, "input_length": 10, "output_length": 3, "hash_ids": [7, 8]}\n\n'
        '{"timestamp": 0, "input_length": 20, "output_length": 4}\n'
    )
    assert read_trace(table) == read_trace(lines) == [
        TraceRequest(0.0, 20, 4), TraceRequest(2.5, 10, 3, hash_ids=(7, 8))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "arrival_s,input_tokens,output_tokens,hash_ids\n1,1,1,x\n", "line 2: hash_ids must be whole numbers"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 1}\n', "line 1: no object with timestamp"),
        ("a.jsonl", "[1]\n", "line 1: no object with timestamp"),
        ("a.jsonl", "hello\n", "line 1"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 0, "output_length": 1}\n', "line 1: input_tokens must be"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}\n',
            "line 1: hash_ids must be whole numbers",
        ),
        ("a.jsonl", "\n", "has no requests"),
    ],
)
def test_a_bad_trace_with_texts_is_refused_by_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_trace(path)


def test_a_trace_that_repeats_says_something_else() -> None:
    trace = (TraceRequest(0.0, 20, 4, hash_ids=(0, 2)), TraceRequest(1.0, 20, 4, hash_ids=(0, 1)))
    load = Scenario(ls_trace=trace, hash_tokens=8).load(2.0, 2.5, 0)
    assert load.hash_tokens == 8
    assert [each.hash_ids for each in load.latency_sensitive] == [(0, 2), (0, 1), (3, 5), (3, 4), (6, 8)]
