"""Fixtures of the tests on real models."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.parallel.conftest import secret_file

__all__ = ["few_objects", "secret_file"]


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Leave what is there out of garbage collections: an engine that captures graphs begins with one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
