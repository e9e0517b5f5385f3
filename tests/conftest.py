"""What every test gets."""

from __future__ import annotations

import pytest
import torch

from tests.stub_server import stub  # noqa: F401 (a fixture)
from tests.triton_interpreter import interpret_triton

if not torch.cuda.is_available():
    interpret_triton()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without a GPU, and tests marked ``slow`` unless ``--slow`` is given."""
    left_out = {}
    if not torch.cuda.is_available():
        left_out["gpu"] = "needs a CUDA device"
    if not config.getoption("--slow"):
        left_out["slow"] = "takes minutes: give --slow"
    for item in items:
        for mark, reason in left_out.items():
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
