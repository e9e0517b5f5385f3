"""What every test gets."""

from __future__ import annotations

import os

import pytest
import torch

from tests.stub_server import stub  # noqa: F401 (a fixture)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests marked ``gpu`` on a machine without one; the summary counts them as skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
