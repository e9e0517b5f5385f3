"""Predicts which batches will miss their window, and how many of their lines have to run as LS requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

from omniserve.server.batches.database import Row

# What a line takes is the mean over so many seconds and lines at least.
_MIN_SPAN_S = 60.0
_MIN_LINES = 20
# Share of the time that is left within which all lines are to be done.
_USABLE = 0.9
# The number of lines that run at a time is the largest of the last so many looks, one a second.
_LOOKS = 5


class Pace:
    """Measures how long a line of one batch takes; while none of them runs, it learns nothing."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, int]] = deque()
        """Samples, one for each change of the number of lines done: (now, seconds that lines had run, that number)."""
        self._now_s = 0.0
        self._busy_s = 0.0
        self._num_running = 0

    def add(self, now_s: float, num_done: int, num_running: int) -> None:
        """Note how many lines are done now, and how many run."""
        samples = self._samples
        if samples:
            self._busy_s += max(num_running, self._num_running) * (now_s - self._now_s)
        self._now_s, self._num_running = now_s, num_running
        if not samples or samples[-1][2] != num_done:
            samples.append((now_s, self._busy_s, num_done))
        enough = max(_MIN_LINES, num_running)
        while len(samples) > 2 and now_s - samples[1][0] >= _MIN_SPAN_S and num_done - samples[1][2] >= enough:
            samples.popleft()

    @property
    def line_s(self) -> float | None:
        """Seconds that a line takes; None as long as none has run.

        As long as fewer were done than run, those that run are taken to be done by now.
        """
        _, busy_before_s, num_before = self._samples[0]
        num_done = max(self._samples[-1][2] - num_before, self._num_running)
        return (self._busy_s - busy_before_s) / num_done if num_done and self._busy_s > busy_before_s else None


def predict(open_lines: Sequence[tuple[int, float | None]], concurrency: int) -> list[float]:
    """Return how many seconds it takes until each batch is done, if they run one after the other.

    ``open_lines`` has, for each batch, the number of its lines that are not done, and the seconds that one takes. Where
    these are not known, the mean of the other batches is taken; without any, the prediction is 0.
    """
    known = [line_s for _, line_s in open_lines if line_s is not None]
    usual_s, work_s, predicted = fmean(known) if known else 0.0, 0.0, []
    for number, line_s in open_lines:
        each_s = usual_s if line_s is None else line_s
        work_s += number * each_s
        predicted.append(max(work_s / max(concurrency, 1), each_s))
    return predicted


def num_urgent(remaining_s: float, left_s: float, concurrency: int) -> int:
    """Return how many lines of a batch, of ``concurrency`` lines at a time, are to run as latency-sensitive requests.

    It is the share of the speed that is missing: none if the predicted ``remaining_s`` is within what is left of the
    window, all if that is over.
    """
    usable_s = _USABLE * left_s
    if usable_s <= 0:
        return concurrency
    if remaining_s <= usable_s:
        return 0
    return math.ceil(concurrency * (1 - usable_s / remaining_s))


class Urgency:
    """Says which batches are late, and by how much; ``concurrency`` lines run at a time."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        """Lines that may run at a time."""
        self._paces: dict[str, Pace] = {}
        self._num_running: deque[int] = deque(maxlen=_LOOKS)
        self.pressure = 0.0
        """The largest share of the time left that batches are predicted to take; above 1, one will be late."""

    def judge(self, now: float, batches: Sequence[Row], num_running: Mapping[str, int]) -> dict[str, int]:
        """Return how many lines of each late batch to escalate, if each batch waits for those that expire before.

        ``now`` is the database's time; the batches are all that are in progress, in the order in which their lines run.
        """
        self._paces = {batch["id"]: self._paces.get(batch["id"]) or Pace() for batch in batches}
        self._num_running.append(sum(num_running.get(batch["id"], 0) for batch in batches))
        open_lines: list[tuple[int, float | None]] = []
        for batch in batches:
            pace, num_done = self._paces[batch["id"]], batch["completed"] + batch["failed"]
            pace.add(now, num_done, num_running.get(batch["id"], 0))
            open_lines.append((batch["total"] - num_done, pace.line_s))
        urgent: dict[str, int] = {}
        self.pressure = 0.0
        for batch, remaining_s in zip(batches, predict(open_lines, max(self._num_running)), strict=True):
            left_s = batch["expires_at"] - now
            if batch["problem"] is None:
                self.pressure = max(self.pressure, remaining_s / max(_USABLE * left_s, 1.0))
            number = num_urgent(remaining_s, left_s, self.concurrency)
            if number and batch["may_escalate"] and batch["problem"] is None:  # else it is not time that it lacks
                urgent[batch["id"]] = number
        return urgent
