"""How long each test takes, the budget of each folder, and how tests are shared out between processes.

tests/durations.json has the seconds of every test function (all its cases, set-up and tear-down included), as one run
of ``make test`` found them, and a budget for each folder. A run prints the folders that went beyond theirs.
``make test ARGS=--write-durations`` writes the file anew; budgets are changed by hand.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

FILE = Path(__file__).with_name("durations.json")
LONG_FILE_S = 25
"""A file of tests that takes longer is shared out by function, and one that does not stays in one process, so that its
servers, models and compiled code are made once."""
TOGETHER = {
    "tests/parallel/": "ranks",  # forked from one process that has imported everything
    "tests/prefill/test_prefill.py": "ranks",
    "tests/latency/test_profiling.py": "a measured profile",
    "tests/server/test_batch_owner.py": "PostgreSQL",
    "tests/server/test_batches_take_over.py": "PostgreSQL",
    "tests/server/test_page.py": "a browser",
    "tests/server/test_real.py": "a server with a model",
}
"""Files or folders whose tests run in one process, however long they take, by what is made there once."""
NOT_COUNTED = ("slow", "exhaustive", "real", "gpu")
"""Marks of tests which the budgets leave out."""


@cache
def recorded() -> dict[str, Any]:
    """Return what the file says; nothing if there is none yet."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"functions": {}, "budgets_s": {}}


@cache
def _seconds_of_files() -> Counter[str]:
    files: Counter[str] = Counter()
    for name, (_, seconds) in recorded()["functions"].items():
        files[name.partition("::")[0]] += seconds
    return files


def function_of(nodeid: str) -> str:
    """Return a test's function: its id without parameters."""
    return nodeid.partition("[")[0]


def folder_of(nodeid: str) -> str:
    """Return the folder of a test below tests/, or tests itself."""
    parts = nodeid.partition("::")[0].split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def unit_of(nodeid: str) -> str:
    """Return the name of the tests that run in one process: some files, a file, or a function of a long file."""
    file = nodeid.partition("::")[0]
    for place, unit in TOGETHER.items():
        if file.startswith(place):
            return unit
    return function_of(nodeid) if _seconds_of_files()[file] > LONG_FILE_S else file


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests, those of one unit together and the longest units first, so that none ends long after the rest.

    Tests without a recorded duration come before all others.
    """
    units: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        units[unit_of(item.nodeid)].append(item)

    def seconds(members: list[pytest.Item]) -> float:
        functions = recorded()["functions"]
        names = sorted({function_of(item.nodeid) for item in members})  # all processes must add up alike
        return sum(functions[name][1] if name in functions else 1e6 for name in names)

    return [item for members in sorted(units.values(), key=seconds, reverse=True) for item in members]


class UnitScheduling(LoadGroupScheduling):
    """Gives each process the next unit (see ``unit_of``), in the order of collection (see ``longest_first``)."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


class Durations:
    """Adds up the durations of a run; the plugin of the process that reports."""

    def __init__(self, *, is_written: bool) -> None:
        self._is_written = is_written
        self._seconds: Counter[str] = Counter()
        self._cases: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not any(mark in report.keywords for mark in NOT_COUNTED):
            name = function_of(report.nodeid)
            self._seconds[name] += report.duration
            self._cases[name].add(report.nodeid)

    def by_folder(self) -> Counter[str]:
        """Return the seconds of all tests of each folder."""
        folders: Counter[str] = Counter()
        for name, seconds in self._seconds.items():
            folders[folder_of(name)] += seconds
        return folders

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._beyond_budget():
            terminalreporter.write_line(line, yellow=True)
        if self._is_written:
            self._write()
            terminalreporter.write_line(f"wrote {FILE.name}: {sum(self._seconds.values()):.0f} s in all")

    def _beyond_budget(self) -> Iterator[str]:
        budgets = recorded()["budgets_s"]
        over = {folder: s for folder, s in self.by_folder().items() if s > budgets.get(folder, 0)}
        if over and sum(self._seconds.values()) > 60:  # a few tests alone carry the set-up of all
            yield f"over the budget of tests/{FILE.name}, in seconds of tests:"
            for folder, seconds in sorted(over.items(), key=lambda item: -item[1]):
                yield f"  {folder}: {seconds:.0f}, budget {budgets.get(folder, 0)}"

    def _write(self) -> None:
        functions = {name: [len(self._cases[name]), round(self._seconds[name], 2)] for name in sorted(self._seconds)}
        budgets = recorded()["budgets_s"]
        seconds = {folder: round(s) for folder, s in sorted(self.by_folder().items())}
        head = {"budgets_s": budgets, "seconds": seconds, "in_all_s": round(sum(self._seconds.values()))}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in functions.items())
        text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "functions": {\n' + lines + "\n }\n}\n"
        FILE.write_text(text)
