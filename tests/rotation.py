"""Rotation of tests: each commit has some of the cases, chosen by its hash; ``--slow`` runs all.

For proofs of the tests, which break the product on purpose to show that other tests notice, and for cases that are
dear and of which one seldom fails alone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest


@cache
def turn() -> str:
    """Return the commit's hash; without git or a repository, the number of the day in its year."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return f"{datetime.now(UTC):%j}"
    return done.stdout.strip() if done.returncode == 0 else f"{datetime.now(UTC):%j}"


def chosen_of(cases: Iterable[Any], count: int) -> list[Any]:
    """Return so many of the cases, which depend on the commit."""
    return sorted(cases, key=lambda case: crc32(f"{turn()} {case}".encode()))[:count]


def rotating(cases: Iterable[Any], count: int) -> list[Any]:
    """Return all cases as parameters, marked ``slow`` but for so many of them, which depend on the commit."""
    cases = list(cases)
    chosen = chosen_of(cases, count)
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]
