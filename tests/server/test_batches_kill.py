"""kill -9 at any moment loses no line and repeats none that was done."""

from __future__ import annotations

from kill_batches import torture


def test_kills_lose_nothing_and_repeat_nothing(tmp_path):
    report = torture(tmp_path, kills=3, seed=1)
    assert report.runs > report.lines or report.seen_running["in_progress"] > 0, f"no kill met work under way: {report}"
