"""Fixtures of the tests of runners."""

from __future__ import annotations

from tests.parity.conftest import few_objects

__all__ = ["few_objects"]
