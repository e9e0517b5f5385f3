"""Fixtures of the tests of prefill engines."""

from __future__ import annotations

from tests.parallel.conftest import secret_file

__all__ = ["secret_file"]
