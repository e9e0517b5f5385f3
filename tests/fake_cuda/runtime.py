"""FakeRuntime: stands for the CUDA runtime under ``torch.cuda``: streams, events, graphs and page-locked memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

_H200 = SimpleNamespace(shared_memory_per_block_optin=227 << 10, multi_processor_count=132, major=9)


class RuleBroken(AssertionError):
    """Code did what it must not do where a GPU runs it."""


class FakeStream:
    """A stream on which everything is over at once."""

    def __init__(self, runtime: FakeRuntime, name: str) -> None:
        self._runtime = runtime
        self.name = name
        self.device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        self._runtime.wait(f"synchronize of stream {self.name}")

    def query(self) -> bool:
        self._runtime.forbid_in_capture(f"query of stream {self.name}")
        return True

    def wait_stream(self, other: FakeStream) -> None:
        self._runtime.forbid_in_capture("wait_stream")

    def wait_event(self, event: FakeEvent) -> None:
        event.require_record("wait_event")

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self._runtime)
        event.record(self)
        return event


class FakeEvent:
    """An event; what it marks is over at the second look, so that a wait looks twice."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._is_recorded = False
        self._num_queries = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self._is_recorded = True
        self._num_queries = 0

    def wait(self, stream: FakeStream | None = None) -> None:
        self.require_record("wait")

    def query(self) -> bool:
        self.require_record("query")
        self._runtime.forbid_in_capture("query of an event")
        self._num_queries += 1
        if self._num_queries == 1:
            return False
        self._runtime.wait("queries of an event")
        return True

    def synchronize(self) -> None:
        self.require_record("synchronize")
        self._runtime.wait("synchronize of an event")

    def require_record(self, what: str) -> None:
        if not self._is_recorded:
            self._runtime.broken(f"{what} of an event that was never recorded")


class FakeGraph:
    """A CUDA graph: it has what was launched while it was captured."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self.launches: Counter[str] | None = None
        """Kernel launches of operators and of Triton's kernels; None: nothing is captured yet."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        runtime = self._runtime
        if runtime.current is runtime.default:
            runtime.broken("a capture on the default stream")
        if runtime.capturing is not None:
            runtime.broken("a capture inside of a capture")
        runtime.capturing = runtime.current
        self._before = Counter(runtime.launches)

    def capture_end(self) -> None:
        runtime = self._runtime
        if runtime.capturing is None:
            runtime.broken("the end of a capture that never began")
        runtime.capturing = None
        self.launches = runtime.launches - self._before
        runtime.graphs.append(self)

    def replay(self) -> None:
        if self.launches is None:
            self._runtime.broken("the replay of a graph that was never captured")
        self._runtime.num_replays += 1


class FakeRuntime:
    """The process's view of its GPU, and the rules for calls of the runtime.

    ``lenient`` switches off the rules for steps; those for captures are always on. A broken rule is an exception where
    it is broken, and is also kept in ``violations``, as the engine may catch exceptions there.
    """

    def __init__(self) -> None:
        self.default = self.current = FakeStream(self, "default")
        self.capturing: FakeStream | None = None
        self.is_lenient = False
        self.may_wait = True
        """The host may wait for an event or a stream."""
        self.violations: list[str] = []
        self.launches: Counter[str] = Counter()
        """Operators that were given to the device, and Triton's kernels, since the start."""
        self.graphs: list[FakeGraph] = []
        self.num_replays = 0
        self._pinned: dict[int, tuple[int, Any]] = {}

    def broken(self, what: str) -> None:
        """Report a broken rule."""
        self.violations.append(what)
        raise RuleBroken(what)

    def forbid(self, what: str) -> None:
        """Report what no step may do, unless the rules are off."""
        if self.capturing is not None or not self.is_lenient:
            self.broken(what)

    def forbid_in_capture(self, what: str) -> None:
        """Report what no capture may hold."""
        if self.capturing is not None:
            self.broken(f"{what} in a capture")

    def wait(self, what: str) -> None:
        """Let the host wait for the device."""
        self.forbid_in_capture(what)
        if not self.may_wait:
            self.forbid(f"{what}: the host waits for the device")

    def launch(self, name: str) -> None:
        """Give the device something to do."""
        if self.capturing is not None and self.current is not self.capturing:
            self.broken(f"{name} on stream {self.current.name} while {self.capturing.name} is captured")
        self.launches[name] += 1

    @contextlib.contextmanager
    def lenient(self) -> Iterator[None]:
        """Switch off the rules for steps, for the time before the first one."""
        before, self.is_lenient = self.is_lenient, True
        try:
            yield
        finally:
            self.is_lenient = before

    @contextlib.contextmanager
    def never_waiting(self) -> Iterator[None]:
        """Forbid the host to wait for the device."""
        before, self.may_wait = self.may_wait, False
        try:
            yield
        finally:
            self.may_wait = before

    @contextlib.contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Stand for ``torch.cuda.stream``."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    # -- page-locked memory --------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        """Count a CPU tensor's memory as page-locked."""
        self.forbid_in_capture("allocation of page-locked memory")
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage.nbytes(), storage  # kept: its address is nothing else's from now on
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Tell whether a CPU tensor lies in page-locked memory."""
        if not tensor.numel():
            return True
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= begin and end <= start + size for start, (size, _) in self._pinned.items())

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self.forbid_in_capture("cudaHostRegister")
        self._pinned[address] = num_bytes, None
        return 0

    def _unregister(self, address: int) -> int:
        self._pinned.pop(address, None)
        return 0

    # -- torch.cuda ----------------------------------------------------------------------------------------------------

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the functions of ``torch.cuda`` that the engine calls."""
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        replaced: dict[str, Callable[..., Any]] = {
            "Stream": lambda device=None, priority=0: FakeStream(self, "side"),
            "Event": lambda **_: FakeEvent(self),
            "CUDAGraph": lambda: FakeGraph(self),
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "stream": self.stream,
            "synchronize": lambda device=None: self.wait("torch.cuda.synchronize"),
            "is_current_stream_capturing": lambda: self.capturing is not None,
            "graph_pool_handle": object,
            "device_of": lambda tensor: contextlib.nullcontext(),
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: "fake H200",
            "get_device_properties": lambda device=None: _H200,
            "device": lambda device: contextlib.nullcontext(),
            "current_device": lambda: 0,
            "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
            "cudart": lambda: cudart,
            "check_error": lambda error: None,
        }
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
