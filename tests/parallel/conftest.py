"""Fixtures that the tests of ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prefill.servers import SECRET


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    """A file with the secret that the test's CPU hosts and prefill engines know."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return str(path)
