"""Progress through named stages, on a terminal and elsewhere, on a clock of the test's own."""

from __future__ import annotations

import io
import re
import warnings

import pytest
from tqdm import TqdmWarning

from benchmarks.common.progress import Stage, StageProgress

STAGES = [Stage(name="start", expected_s=20.0), Stage(name="load", expected_s=10.0)]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_total_follows_stages_that_take_longer_or_shorter() -> None:
    clock, terminal = Clock(), Terminal()
    with warnings.catch_warnings(), StageProgress(STAGES, stream=terminal, clock=clock) as progress:
        warnings.simplefilter("error", TqdmWarning)
        progress.begin("start")
        assert progress.total_s == 30.0
        clock.now_s += 65.0  # 45 s longer than expected
        progress._draw()
        assert progress.elapsed_s == 65.0 and progress.total_s == 76.0
        progress.begin("load")
        assert progress.total_s == 75.0
        progress.tell("3 of 4")
        clock.now_s += 30.0
        progress._draw()
        assert progress.total_s > progress.elapsed_s  # full only when it is over
    shown = terminal.getvalue()
    assert "0 of about 30 s: start" in shown and "65 of about 76 s: start" in shown
    assert "65 of about 75 s: load" in shown and "95 of about 96 s: load, 3 of 4" in shown
    assert not re.search(r"100%", shown)


def test_without_a_terminal_each_stage_is_a_line() -> None:
    clock, pipe = Clock(), io.StringIO()
    with StageProgress(STAGES, stream=pipe, clock=clock) as progress:
        progress.begin("start")
        for _ in range(100):
            progress.tell("more")
            progress._draw()
        clock.now_s += 12.0
        progress.begin("load")
    assert pipe.getvalue().splitlines() == [
        "2 stages, about 30 s",
        "   0 s: start, about 20 s",
        "  12 s: load, about 10 s",
    ]


def test_stages_come_in_their_order() -> None:
    with StageProgress(STAGES, stream=io.StringIO()) as progress:
        with pytest.raises(ValueError, match="the next stage is 'start', not 'load'"):
            progress.begin("load")
        progress.begin("start")
        progress.begin("load")
        with pytest.raises(ValueError, match="the next stage is 'the end', not 'load'"):
            progress.begin("load")
