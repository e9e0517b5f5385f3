"""What every test gets."""

from __future__ import annotations

import pytest
import torch

from tests.stub_server import stub  # noqa: F401 (a fixture)
from tests.triton_interpreter import interpret_triton

if not torch.cuda.is_available():
    interpret_triton()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests marked ``gpu`` on a machine without one; the summary counts them as skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
