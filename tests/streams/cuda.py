"""A made-up ``torch.cuda``, under which the product takes a lazy device for a GPU. It is for a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import include_paths, library_paths
from transformers import PreTrainedModel

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import AttentionMetadata
from omniserve.ops.attention.base import graph_safe
from omniserve.ops.cuda import kernels
from tests.ops.host_layout import pack_blocks, read_blocks
from tests.runner import tape
from tests.streams.device import Graph, LazyDevice, Order, Point, Pool, Stream
from tests.streams.pinned import PinnedMemory, poison
from tests.streams.tensors import CUDA, HostWork, LazyMode, LazyTensor

_GUARD = Path(__file__).with_name("guard.cpp")


class FakeCuda:
    """A lazy device, the mode that queues its work, and what stands for ``torch.cuda`` in this process."""

    def __init__(self) -> None:
        self.device = LazyDevice(Order("eager", "eager"))
        self.pinned = PinnedMemory()
        self.mode = LazyMode(self.device, self.pinned)
        self._load_guard()
        self._replace_torch_cuda()
        self._replace_factories()
        self._replace_kernels()

    def _load_guard(self) -> None:
        """Register a device guard for CUDA, which a CPU build of torch has not."""
        key = hashlib.sha256(_GUARD.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
        library = Path(tempfile.gettempdir()) / f"omniserve-guard-{os.getuid()}-{key}.so"
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            paths = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
            subprocess.run(
                [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", _GUARD, "-o", made, *paths, "-lc10"],
                check=True,
            )
            made.replace(library)
        ctypes.CDLL(str(library))

    def _replace_torch_cuda(self) -> None:
        lazy = self.device

        class FakeEvent:
            def __init__(self, **_: Any) -> None:
                self.point: Point | None = None

            def record(self, stream: Stream | None = None) -> None:
                self.point = (stream or lazy.current).record()

            def synchronize(self) -> None:
                if self.point is not None:
                    lazy.run_until(self.point)

            def query(self) -> bool:
                return self.point is None or lazy.reached(self.point)

            def wait(self, stream: Stream | None = None) -> None:
                if self.point is not None:
                    (stream or lazy.current).wait(self.point)

        class FakeStream(Stream):
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                super().__init__(lazy)

            @property
            def device(self) -> torch.device:
                return CUDA

            def wait_stream(self, stream: Stream) -> None:
                self.wait(stream.record())

            def wait_event(self, event: FakeEvent) -> None:
                event.wait(self)

            def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
                event = event or FakeEvent()
                event.record(self)
                return event

            def synchronize(self) -> None:
                lazy.synchronize(self)

            def query(self) -> bool:
                return lazy.reached(self.record())

        lazy.main.__class__ = FakeStream  # it was made before

        @contextlib.contextmanager
        def stream_of(stream: Stream | None) -> Iterator[None]:
            before = lazy.current
            lazy.current = stream or before
            try:
                yield
            finally:
                lazy.current = before

        class FakeGraph:
            def capture_begin(self, pool: Pool, capture_error_mode: str = "global") -> None:
                assert not lazy.current.is_main, "the default stream cannot be captured"
                # What graphs of this pool let go before may be where this one writes.
                self.graph = lazy.current.graph = Graph(pool)
                self._overwritten = list(pool.free)

            def capture_end(self) -> None:
                lazy.current.graph = None

            def replay(self) -> None:

                overwritten = self._overwritten
                lazy.current.give(lambda: [poison(raw) for raw in overwritten])
                for work in self.graph.work:
                    lazy.current.give(work)

        class Runtime:
            cudaHostRegister = staticmethod(lambda address, size, flags: self.pinned.register(address, size) or 0)
            cudaHostUnregister = staticmethod(lambda address: self.pinned.unregister(address) or 0)

        replaced = {
            "_lazy_init": lambda: None,
            "Event": FakeEvent,
            "Stream": FakeStream,
            "CUDAGraph": FakeGraph,
            "graph_pool_handle": Pool,
            "current_stream": lambda device=None: lazy.current,
            "stream": stream_of,
            "synchronize": lambda device=None: lazy.synchronize(),
            "is_current_stream_capturing": lambda: lazy.current.graph is not None,
            "cudart": lambda: Runtime,
            "check_error": lambda error: None,
            "get_device_name": lambda device=None: "lazy",
            "device": lambda device: contextlib.nullcontext(),
            "current_device": lambda: CUDA.index,
            "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        }
        for name, value in replaced.items():
            setattr(torch.cuda, name, value)

    def _replace_factories(self) -> None:
        tensor = torch.tensor

        def make(data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made = tensor(data, **kwargs)
            if device is not None and torch.device(device).type == "cuda":
                return made.to(device)
            return made.pin_memory() if pin_memory else made

        def pin(host: Tensor) -> Tensor:
            if self.pinned.has(host):
                return host
            made = self.pinned.allocate(host.shape, host.dtype)
            made.copy_(host)
            return made

        torch.tensor = make
        torch.Tensor.pin_memory = pin  # type: ignore[method-assign, assignment]
        torch.Tensor.is_pinned = lambda host, device=None: self.pinned.has(host)  # type: ignore[method-assign, misc]

    def _replace_kernels(self) -> None:
        def gather_rows(source_SD: Tensor, slots_R: Tensor, destination_SD: Tensor) -> None:
            source, slots, destination = self.pinned.alias(source_SD), slots_R.raw, destination_SD.raw

            def work() -> None:
                wanted = slots[slots >= 0]
                destination[wanted] = source[wanted]

            assert self.pinned.has(source_SD)
            self.mode.launch(HostWork(work, slots), (slots_R, destination_SD))

        def copy_blocks(
            k: Tensor, v: Tensor, pool: Tensor, device_ids: Tensor, pool_ids: Tensor, *, to_host: bool,
            is_reversed: bool,
        ) -> None:  # fmt: skip
            assert self.pinned.has(pool)
            work = partial(
                _copy_blocks, k.raw, v.raw, self.pinned.alias(pool), device_ids.raw, pool_ids.raw, to_host, is_reversed
            )
            self.mode.launch(HostWork(work, pool_ids.raw), (k, v, device_ids, pool_ids))

        kernels("rows").gather_rows = gather_rows  # type: ignore[attr-defined]
        kernels("blocks").copy_blocks = copy_blocks  # type: ignore[attr-defined]

    def to_device(self, model: PreTrainedModel) -> PreTrainedModel:
        """Bring a model's parameters and buffers to the device, in place."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    lazy = self.mode.of_host(parameter.data)
                    module._parameters[name] = nn.Parameter(lazy, requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.mode.of_host(buffer)
        assert isinstance(next(model.parameters()), LazyTensor) and model.device == CUDA
        return model


def _copy_blocks(
    k: Tensor, v: Tensor, pool: Tensor, device_ids: Tensor, pool_ids: Tensor, to_host: bool, is_reversed: bool
) -> None:
    def turned(blocks: Tensor) -> Tensor:
        return blocks.flip(3) if is_reversed else blocks

    if to_host:
        pool[:, pool_ids] = pack_blocks(turned(k[:, device_ids]), turned(v[:, device_ids]))
    else:
        keys, values = read_blocks(pool[:, pool_ids])
        k[:, device_ids], v[:, device_ids] = turned(keys), turned(values)


@graph_safe
def attend(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Device attention that looks at no value on the host."""
    return tape.attend(q_TNH, k_cache_BKSH, v_cache_BKSH, metadata, spec)
