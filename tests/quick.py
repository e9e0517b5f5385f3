"""Cases of a parametrised test that ``make test`` runs; the others are marked ``slow``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters, those that are not among the quick ones marked ``slow``."""
    return [case if case in quick else pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
