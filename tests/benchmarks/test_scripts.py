"""Cases of benchmarks run from end to end at tiny sizes, and write a record; and what their figures are made of."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.cases import Benchmark, Trials, compared, table_of_arms
from benchmarks.common.terminal import argument_parser
from benchmarks.costs import COSTS
from benchmarks.decode_rate import RATE
from benchmarks.features import FEATURES
from benchmarks.front import FRONT
from benchmarks.machines import MACHINES
from benchmarks.paper.measured import MEASURED
from benchmarks.prefixes import PREFIXES
from benchmarks.rank_loading import LOADING

importlib.import_module("benchmarks.features.__main__")  # it has all cases
BENCHMARKS = {each.name: each for each in (FEATURES, PREFIXES, MACHINES, COSTS, RATE, MEASURED, LOADING, FRONT)}
CASES = [(benchmark.name, case) for benchmark in BENCHMARKS.values() for case in benchmark.cases]
QUICK = ("sampling", "host_rows")
ENVIRONMENT = {"linears": {"GOMP_SPINCOUNT": "10000", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}


@pytest.mark.parametrize(
    ("benchmark_name", "name"),
    [pytest.param(*each, marks=() if each[1] in QUICK else pytest.mark.exhaustive) for each in CASES],
)
def test_case_runs_and_is_recorded(
    benchmark_name: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "record.json", list[dict[str, Any]]()
    monkeypatch.setattr("benchmarks.common.cases.write_record", lambda path, **row: written.append(row))
    for variable, value in ENVIRONMENT.get(name, {}).items():
        monkeypatch.setenv(variable, value)
    assert BENCHMARKS[benchmark_name].main([name, "--tiny", "--record", str(path)]) == 0
    (row,) = written
    assert (row["name"], row["case"]) == (benchmark_name, name)
    assert row["results"] and row["results"].keys() == row["raw"].keys()
    for label, result in row["results"].items():
        assert any(result["medians"].values()), label
        assert result["medians"].keys() == row["raw"][label].keys()
    json.dumps(row["config"])


# -- how cases are run ----------------------------------------------------------------------------------------------


def benchmark_of_two() -> Benchmark:
    """Return a benchmark with the cases ``first``, which counts calls, and ``second``."""
    benchmark = Benchmark("two")

    @benchmark.case(tiny={"repeats": 1}, repeats=3, step=(1, "of a count"))
    def first(args: Namespace) -> Trials:
        """Count.

        And more.
        """
        count = {"off": 0.0, "on": 10.0}

        def call(arm: str) -> dict[str, Any]:
            count[arm] += args.step
            return {"count": count[arm], "same": True, "list": [1]}

        result = yield "load", {"off": lambda: call("off"), "on": lambda: call("on")}
        result["calls"] = len(result["raw"]["on"])

    @benchmark.case(tiny={}, uncounted=0, names=["a"])
    def second(args: Namespace) -> Trials:
        """Name."""
        for name in args.names:
            yield name, {"alone": lambda: {"figure": 1}}

    return benchmark


def test_arms_take_turns_and_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, Any]] = []
    monkeypatch.setattr("benchmarks.common.cases.write_record", lambda path, **row: written.append(row))
    assert benchmark_of_two().main(["first", "--step", "2"]) == 0
    (row,) = written
    # A first call of each is not counted.
    assert [sample["count"] for sample in row["raw"]["load"]["on"]] == [14, 16, 18]
    assert row["results"]["load"] == {
        "medians": {"off": {"count": 6, "same": True}, "on": {"count": 16, "same": True}},
        "ratios": {"on": {"count": 16 / 6}}, "calls": 3,
    }  # fmt: skip
    assert row["config"]["step"] == 2 and row["config"]["repeats"] == 3


def test_a_figure_that_is_missing_or_0_has_no_ratio() -> None:
    found = {"off": [{"a": 0, "b": None, "c": 2.0}], "on": [{"a": 1, "b": 2, "c": 4.0, "d": 1}]}
    result = compared(found)
    assert result["ratios"] == {"on": {"c": 2.0}} and "b" not in result["medians"]["off"]
    assert "| 4 (2) |" in table_of_arms("load", result)


def test_cases_are_named_before_flags(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = benchmark_of_two()
    chosen, args = benchmark.parse(["second", "first", "--names", "x", "y", "--tiny"])
    assert [case.name for case in chosen] == ["second", "first"]
    first, second = (benchmark.cases[name].arguments(vars(args), tiny=args.tiny) for name in ("first", "second"))
    assert vars(first) == {"repeats": 1, "step": 1} and vars(second) == {"names": ["x", "y"]}
    assert [case.name for case in benchmark.parse([])[0]] == ["first", "second"]
    assert benchmark.main(["--list"]) == 0 and "first: Count.\nsecond: Name.\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.parse(["third"])
    with pytest.raises(SystemExit):
        benchmark.parse(["second", "--step", "1"])


def test_several_cases_run_in_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, int(command[3] == "first"))

    monkeypatch.setattr(subprocess, "run", run)
    assert benchmark_of_two().main(["--names", "x", "y", "--step", "2", "--tiny", "--record", "r"]) == 1
    assert commands == [
        ["benchmarks.two", "first", "--record", "r", "--tiny", "--step", "2"],
        ["benchmarks.two", "second", "--record", "r", "--tiny", "--names", "x", "y"],
    ]


def test_a_case_starts_anew_with_the_variables_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        raise RuntimeError(f"{command[3:]} {environment['GLIBC_TUNABLES']}")

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with pytest.raises(RuntimeError, match=r"'linears', '--tiny'\] glibc.malloc.hugetlb=1"):
        COSTS.main(["linears", "--tiny"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_flags_that_cases_share_are_of_one_kind(name: str) -> None:
    kinds: dict[str, set[type]] = {}
    for case in BENCHMARKS[name].cases.values():
        assert case.tiny.keys() <= case.sizes.keys() and case.about
        for size, value in vars(case.arguments({})).items():
            kinds.setdefault(size, set()).add(type(value))
    assert {size: found for size, found in kinds.items() if len(found) > 1} == {}


def test_flags_have_the_types_of_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argument_parser("What.", "x", rows=([1, 2], "of it"), rate=0.5, quick=(False, "soon"), folder=Path("docs"))
    args = parser.parse_args(["--rows", "3", "--rate", "2", "--folder", "a/b"])
    assert vars(args) == {
        "rows": [3], "rate": 2.0, "quick": False, "folder": Path("a/b"), "record": Path(".cache/x.json"),
    }  # fmt: skip
    with pytest.raises(SystemExit):
        parser.parse_args(["--rows", "few"])
    assert "argument --rows: invalid int value: 'few'" in capsys.readouterr().err
