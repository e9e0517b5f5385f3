"""Engines, API workers and fronts that die, hang or are cut off during batches and chats lose no line.

And every call is answered, but those on the connections of what was killed.
"""

from __future__ import annotations

import pytest
from kill_engines import torture


@pytest.mark.slow
def test_kills_of_engines_lose_nothing_and_double_nothing(tmp_path):
    report = torture(tmp_path, kills=12, seed=1)
    assert report.kills.total() >= 10 and report.lines and report.whole, report


@pytest.mark.slow
def test_kills_of_engines_of_ray_lose_nothing_and_double_nothing(tmp_path):
    pytest.importorskip("ray")
    report = torture(tmp_path, kills=6, seed=2, with_ray=True)
    assert report.kills.total() >= 5 and report.lines and report.whole, report
