"""LazyDevice: a device that only notes what it is given, stream by stream, and runs it in any order that they allow.

Work is a Python function. A stream's work runs in the order in which it was given, and not before the events that the
stream waits for; beyond that an `Order` decides. The host finds out nothing but by an event, a stream or a copy that it
waits for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

Eagerness = Literal["random", "eager", "late"]


@dataclass(frozen=True, slots=True)
class Order:
    """The order of streams' work where nothing forces one: at once, as late as possible, or now and then."""

    main: Eagerness
    """The eagerness of the default stream."""
    side: Eagerness
    """The eagerness of all other streams."""
    seed: int = 0

    def __str__(self) -> str:
        return f"main {self.main}, side {self.side}, seed {self.seed}"


EXTREMES = (Order("late", "late"), Order("eager", "eager"), Order("eager", "late"), Order("late", "eager"))


@dataclass(slots=True, eq=False)
class Point:
    """A place in a stream, as an event records it."""

    stream: Stream
    is_done: bool = False
    patience: int = 0
    """The number of further queries that are told that it is not reached, unless it is."""


Work = Callable[[], object] | Point | tuple[Point]
"""A function; a point that is reached; a point that is waited for."""


@dataclass(eq=False)
class Graph:
    """Work that a stream was given while it was captured."""

    pool: Pool
    work: list[Callable[[], object]] = field(default_factory=list)


@dataclass(eq=False)
class Pool:
    """Memory that graphs share: what one of them let go, the next one may write to."""

    free: list[torch.Tensor] = field(default_factory=list)


class Stream:
    """A queue of work."""

    def __init__(self, device: LazyDevice, *, is_main: bool = False) -> None:
        self.lazy = device
        self.is_main = is_main
        self.queue: deque[Work] = deque()
        self.graph: Graph | None = None
        """The graph that is being captured on this stream."""
        device.streams.append(self)

    def give(self, work: Callable[[], object]) -> None:
        """Queue a function, or note it if a graph is captured here."""
        if self.graph is not None:
            self.graph.work.append(work)
            return
        self.queue.append(work)
        self.lazy.go_on()

    def record(self) -> Point:
        """Return the place behind all that was given."""
        assert self.graph is None, "an event is recorded while a graph is captured"
        point = Point(self, patience=self.lazy.draw_patience())
        self.queue.append(point)
        self.lazy.go_on()
        return point

    def wait(self, point: Point) -> None:
        """Let what is given from now on run after a point."""
        assert self.graph is None, "an event is waited for while a graph is captured"
        if point.stream is not self:
            self.queue.append((point,))

    @property
    def eagerness(self) -> Eagerness:
        return self.lazy.order.main if self.is_main else self.lazy.order.side

    def can_run(self) -> bool:
        """Tell whether the first in the queue waits for nothing."""
        return bool(self.queue) and not (isinstance(self.queue[0], tuple) and not self.queue[0][0].is_done)

    def run_one(self) -> None:
        """Run the first in the queue, whatever it waits for first."""
        work = self.queue[0]
        if isinstance(work, tuple):
            self.lazy.run_until(work[0])
            self.queue.popleft()
            return
        self.queue.popleft()
        if isinstance(work, Point):
            work.is_done = True
        else:
            work()


class LazyDevice:
    """Streams, the order in which their work runs, and the stream that the host gives work to.

    Args:
        order: When work runs.
    """

    def __init__(self, order: Order) -> None:
        self.streams: list[Stream] = []
        self.main = Stream(self, is_main=True)
        self.current = self.main
        self.is_running = False
        self.num_works = 0
        self.set_order(order)

    def set_order(self, order: Order) -> None:
        """Go on in another order."""
        self.order = order
        self._rng = random.Random(str(order))

    def draw_patience(self) -> int:
        """Return how many queries of a new event are told that it is not reached."""
        return self._rng.choice((0, 1, 4, 15))

    # -- progress ------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Run what the order says, as the host does something."""
        if self.is_running or self.current.graph is not None:
            return
        for stream in self.streams:
            if stream.eagerness == "eager":
                while stream.can_run():
                    self._run(stream)
        if self._rng.random() < 0.05:
            for _ in range(self._rng.choice((1, 3, 20, 100))):
                able = [s for s in self.streams if s.eagerness == "random" and s.can_run()]
                if not able:
                    break
                self._run(self._rng.choice(able))

    def run_until(self, point: Point) -> None:
        """Run what a point needs, and no more."""
        while not point.is_done:
            self._run(point.stream)

    def drain(self) -> None:
        """Run everything."""
        for stream in self.streams:
            while stream.queue:
                self._run(stream)

    def reached(self, point: Point) -> bool:
        """Tell the host whether a point is reached; it is at last, if the host asks again and again."""
        self.go_on()
        if not point.is_done and point.patience == 0:
            self.run_until(point)
        point.patience = max(0, point.patience - 1)
        return point.is_done

    def _run(self, stream: Stream) -> None:
        was_running, self.is_running = self.is_running, True
        self.num_works += 1
        try:
            with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode():
                stream.run_one()
        finally:
            self.is_running = was_running

    # -- the host's side -----------------------------------------------------------------------------------------------

    def synchronize(self, stream: Stream | None = None) -> None:
        """Let the host wait for a stream; None: for all."""
        assert self.current.graph is None, "the host waits while a graph is captured"
        for each in [stream] if stream is not None else self.streams:
            self.run_until(each.record())

    def works(self) -> Iterator[Callable[[], object]]:
        """Yield what has not run yet."""
        for stream in self.streams:
            yield from (work for work in stream.queue if callable(work))

    def forget(self) -> None:
        """Drop all that has not run, as after an error."""
        for stream in self.streams:
            for work in stream.queue:
                if isinstance(work, Point):
                    work.is_done = True
            stream.queue.clear()
            stream.graph = None
        self.current = self.main
