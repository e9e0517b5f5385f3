"""Waits for the device: they end soon after it does, take no core meanwhile, and end with an error if it never does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omniserve import Stalled
from omniserve.ops import streams
from omniserve.ops.streams import AsyncHostCopy, StreamEvent, drain, wait_for
from omniserve.runner.safepoint import LayerThrottle

CUDA = torch.device("cuda")


class Clock:
    """Time that passes by sleeping, and a microsecond with every look at it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds


class DoneAt:
    """An event that the device gets to at a time."""

    def __init__(self, clock: Clock, at_s: float) -> None:
        self._clock = clock
        self._at_s = at_s

    def query(self) -> bool:
        return self._clock.now_s >= self._at_s


class Never:
    """An event that the device does not get to; also in place of ``torch.cuda.Event``."""

    def query(self) -> bool:
        return False

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pytest.fail("it would hang here")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(streams, "time", clock)
    return clock


def test_what_is_over_is_not_waited_for(clock: Clock) -> None:
    wait_for(DoneAt(clock, 0.0), "nothing")
    assert clock.now_s == 0.0


@pytest.mark.parametrize("at_s", [50e-6, 1e-3, 5e-3, 0.1, 2.0])
def test_the_end_is_seen_soon_and_the_core_is_free_meanwhile(clock: Clock, at_s: float) -> None:
    wait_for(DoneAt(clock, at_s), "a step")
    assert clock.now_s - at_s <= max(60e-6, min(at_s / 25, 1.1e-3))
    assert sum(clock.sleeps) >= 0.95 * at_s - 300e-6, "beside the first 200 us and the looks"
    assert clock.sleeps == sorted(clock.sleeps) and max(clock.sleeps, default=0.0) <= 1e-3


def test_a_measurement_never_sleeps(clock: Clock) -> None:
    wait_for(DoneAt(clock, 0.05), "a step", spins=True)
    assert not clock.sleeps and clock.now_s < 0.0501


def test_what_does_not_end_is_an_error_that_says_what_and_how_long(clock: Clock) -> None:
    with pytest.raises(
        Stalled, match=r"not finished a step's tokens within 60 s: .*nvidia-smi.*start the process again"
    ):
        wait_for(Never(), "a step's tokens")
    assert 60 <= clock.now_s < 60.01
    with pytest.raises(Stalled, match=r"within 0\.5 s"):
        wait_for(Never(), "a step's tokens", timeout_s=0.5)


def waits() -> dict[str, Callable[[], object]]:
    copy = AsyncHostCopy([torch.zeros(2)])
    copy._packed, copy._done = torch.zeros(2), StreamEvent(torch.device("cpu"))
    copy._done._event = Never()  # type: ignore[assignment]
    throttle = LayerThrottle(CUDA)
    return {
        "a step's tokens": copy.wait,
        "a step": lambda: StreamEvent(CUDA).wait("a step"),
        "a layer": lambda: [throttle.wait() for _ in range(2)],
        "all that it was given": lambda: drain(CUDA),
    }


@pytest.mark.parametrize("what", waits())
def test_every_wait_for_the_device_has_a_deadline(monkeypatch: pytest.MonkeyPatch, clock: Clock, what: str) -> None:
    class Stream:
        def record_event(self, event: object = None) -> Never:
            return Never()

    monkeypatch.setattr(torch.cuda, "Event", Never)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("it would hang here"))
    with pytest.raises(Stalled, match=f"not finished {what} within 60 s"):
        waits()[what]()


def test_draining_waits_for_the_current_stream_with_a_deadline_and_then_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    answers = itertools.chain([False, False], itertools.repeat(True))

    class Event:
        def query(self) -> bool:
            calls.append("query")
            return next(answers)

    class Stream:
        def record_event(self) -> Event:
            calls.append("record")
            return Event()

    def note(name: str, result: Any = None) -> Callable[[torch.device], Any]:
        return lambda device: calls.append(f"{name} {device}") or result

    monkeypatch.setattr(torch.cuda, "current_stream", note("stream", Stream()))
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    drain(torch.device("cpu"))
    assert not calls
    drain(torch.device("cuda", 1))
    assert calls == ["stream cuda:1", "record", "query", "query", "query", "synchronize cuda:1"]
