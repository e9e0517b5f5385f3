"""Streams, events and graphs of GPUs that are not there: each notes the device that it is of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class FakeCuda:
    """Stands in for ``torch.cuda``; device 0 is the current one, as it is in a thread that chose none."""

    def __init__(self) -> None:
        self.current = 0
        self.noted: list[tuple[str, int]] = []
        """Calls, each with the device that it was for."""

    def devices(self, what: str) -> set[int]:
        """Return the devices on which something was done."""
        return {device for done, device in self.noted if done == what}

    def _index(self, device: Any = None) -> int:
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current if index is None else index

    def _stream(self, device: Any = None) -> SimpleNamespace:
        stream = SimpleNamespace(device=torch.device("cuda", self._index(device)), wait_stream=lambda other: None)

        def record_event() -> SimpleNamespace:
            event = self._event()
            event.record(stream)
            return event

        stream.record_event = record_event
        return stream

    @contextlib.contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self._index(device)
        try:
            yield
        finally:
            self.current = before

    def _on_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return self._device(stream.device)  # torch makes the stream's device the current one, too

    def _event(self) -> SimpleNamespace:
        def record(stream: Any = None) -> None:
            self.noted.append(("record", (stream or self._stream()).device.index))

        return SimpleNamespace(record=record, query=lambda: True)

    def _graph(self) -> SimpleNamespace:
        """Return what checks that begin and end are on one device."""

        def note(what: str) -> None:
            self.noted.append((what, self.current))

        return SimpleNamespace(
            capture_begin=lambda *args, **options: note("capture_begin"),
            capture_end=lambda: note("capture_end"),
            replay=lambda: None,
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def synchronize(device: Any = None) -> None:
            self.noted.append(("synchronize", self._index(device)))

        for name, stand_in in (
            ("current_device", lambda: self.current), ("device", self._device), ("Stream", self._stream),
            ("current_stream", self._stream), ("stream", self._on_stream), ("Event", self._event),
            ("CUDAGraph", self._graph), ("graph_pool_handle", lambda: (0, 1)), ("synchronize", synchronize),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    return cuda
