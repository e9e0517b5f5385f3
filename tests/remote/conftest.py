"""Fixtures of the tests of connections to other machines."""

from __future__ import annotations

from tests.host.conftest import one_torch_thread
from tests.parallel.conftest import secret_file

__all__ = ["one_torch_thread", "secret_file"]
