"""Engines that die, hang or are cut off during batches and chats lose no line, and every call is answered."""

from __future__ import annotations

import pytest
from kill_engines import torture


@pytest.mark.slow
def test_kills_of_engines_lose_nothing_and_double_nothing(tmp_path):
    report = torture(tmp_path, kills=12, seed=1)
    assert report.kills.total() >= 10 and report.lines and report.whole, report
