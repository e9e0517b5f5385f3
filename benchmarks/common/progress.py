"""Progress through named stages: a bar on a terminal, elsewhere one line for each stage."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

_PERIOD_S = 0.5
_LEAST_LEFT_S = 1.0
"""Seconds left that are shown of a stage which takes longer than expected, until it ends."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run."""

    name: str
    expected_s: float
    """Expected length in seconds, roughly."""


class StageProgress:
    """Shows which stage runs, the seconds since the first one began and the seconds that all of them will take.

    The total follows what happens: a stage that ends early makes it smaller, one that goes on makes it larger, so that
    the bar is full when the last stage has ended and not before. A context manager.

    Args:
        stages: In their order.
        stream: Where it is shown; None: standard error.
        clock: Returns seconds.
    """

    def __init__(
        self, stages: Sequence[Stage], *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stages = list(stages)
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began_s = self._stage_began_s = clock()
        self._current: Stage | None = None
        self._detail = ""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._bar = tqdm(
            total=self.total_s, disable=None, leave=False, file=self._stream, dynamic_ncols=True,
            bar_format="{percentage:3.0f}% |{bar}| {n:.0f} of about {total:.0f} s: {desc}",
        )  # fmt: skip
        self._thread = threading.Thread(target=self._keep_fresh, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._bar.disable:
            self._stream.write(f"{len(self._stages)} stages, about {self.total_s:.0f} s\n")
            self._stream.flush()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._bar.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the progress was made."""
        return self._clock() - self._began_s

    @property
    def total_s(self) -> float:
        """Seconds from the first stage's begin to the last one's end, as far as that can be told now."""
        left_s = sum(stage.expected_s for stage in self._stages)
        if self._current is not None:
            left_s += max(self._current.expected_s - (self._clock() - self._stage_began_s), _LEAST_LEFT_S)
        return self.elapsed_s + left_s

    def begin(self, name: str) -> None:
        """End the stage that runs and begin the next one.

        Raises:
            ValueError: The next stage has another name.
        """
        with self._lock:
            if not self._stages or self._stages[0].name != name:
                expected = self._stages[0].name if self._stages else "the end"
                raise ValueError(f"the next stage is {expected!r}, not {name!r}")
            self._current, self._detail = self._stages.pop(0), ""
            self._stage_began_s = self._clock()
            if self._bar.disable:
                self._stream.write(f"{self.elapsed_s:4.0f} s: {name}, about {self._current.expected_s:.0f} s\n")
                self._stream.flush()
        self._draw()

    def tell(self, detail: str) -> None:
        """Show how far the stage is, on a terminal."""
        self._detail = detail

    def _keep_fresh(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self._bar.disable or self._current is None:
                return
            self._bar.n, self._bar.total = self.elapsed_s, self.total_s
            text = f"{self._current.name}, {self._detail}" if self._detail else self._current.name
            self._bar.set_description_str(text, refresh=True)
