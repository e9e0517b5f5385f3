"""docs/papers.md counts its own rows, and names only files, classes, options and experiments that exist."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.paper.figures import FIGURES
from benchmarks.reproduction import EXPERIMENTS
from omniserve.sched import SCHEDULERS

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
PACKAGE = Path(__file__).parents[2] / "omniserve"
TEXT = PAGE.read_text()
VERDICTS = ("as the paper", "as the paper under", "differs", "missing")
HEADS = ("section", "figure")


def rows() -> list[tuple[str, list[str]]]:
    """Return the paper and the cells of each row."""
    found, paper = [], ""
    for line in TEXT.splitlines():
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) == 4 and cells[0] not in HEADS:
            found.append((paper, cells))
    return found


def test_each_row_says_how_it_stands() -> None:
    verdicts = "|".join(VERDICTS)
    for paper, cells in rows():
        assert re.match(rf"\*\*({verdicts})\*\*", cells[-1]), f"{paper}: {cells}"
        if cells[-1].startswith("**differs**"):
            assert cells[-1].startswith("**differs**: "), f"no reason: {cells}"
        if cells[-1].startswith("**as the paper under**"):
            assert "; default differs: " in cells[-1], f"no default: {cells}"


def test_the_counts_are_those_of_the_rows() -> None:
    counted: dict[str, Counter[str]] = {}
    for paper, cells in rows():
        counted.setdefault(paper, Counter())[cells[-1].split("**")[1]] += 1
    counted["all"] = sum(counted.values(), Counter())
    said = {}
    lines = [line for line in TEXT[TEXT.index("## In all") :].splitlines() if line.startswith("| ")]
    for line in lines[1:]:
        name, *numbers = line.strip("| ").split(" | ")
        said[name] = [int(number) for number in numbers]
    assert said == {
        name: [*(counts[verdict] for verdict in VERDICTS), counts.total()] for name, counts in counted.items()
    }


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert (PAGE.parent / target).exists(), target


def test_experiments_exist() -> None:
    names = {*EXPERIMENTS, *FIGURES, *SCHEDULERS.names()}
    for name in re.findall(r"`((?:omniserve|apex|conserve|bros)-[\w*-]+)`", TEXT):
        assert any(fnmatch(known, name) for known in names), name


def test_classes_functions_and_options_exist() -> None:
    words: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        words |= set(re.findall(r"\w+", path.read_text()))
    for paper, cells in rows():
        for name in re.findall(r"`((?:\w+\.)*\w+)(?:=\w+)?`", cells[2]):
            assert set(name.split(".")) <= words, f"{paper}: {name}"
