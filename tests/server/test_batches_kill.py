"""kill -9 at any moment loses no line and repeats none that was done."""

from __future__ import annotations

from kill_batches import torture


def test_kills_lose_nothing_and_repeat_nothing(tmp_path):
    report = torture(tmp_path, kills=5, seed=1)
    assert report.kills == 5 and report.lines >= 150
