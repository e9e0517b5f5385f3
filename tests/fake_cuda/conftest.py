"""A fake GPU for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_cuda.guard import register_guard
from tests.fake_cuda.runtime import FakeRuntime
from tests.fake_cuda.watch import fake_gpu


@pytest.fixture(scope="session")
def device_guard() -> None:
    """CUDA's device guard."""
    register_guard()


@pytest.fixture
def gpu(device_guard: None) -> Iterator[FakeRuntime]:
    """The runtime of a fake GPU; whatever a test does, no rule may be broken but where it says so."""
    with fake_gpu() as runtime:
        yield runtime
    assert not runtime.violations
