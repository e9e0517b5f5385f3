"""A model on the second GPU uses that one, whatever the current one of the calling thread is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from omniserve.core.config import EngineConfig
from omniserve.core.setup import HostTierSetup
from omniserve.host import tier as tier_module
from omniserve.host.memory import allocate_pool
from omniserve.host.mover import DirectMover
from omniserve.host.tier import HostTier
from omniserve.ops.streams import AsyncHostCopy, StreamEvent
from omniserve.profiling.timer import Timer
from omniserve.runner.cuda_graphs.capture import CudaGraphCapture
from omniserve.runner.safepoint import LayerThrottle
from tests.cuda_indices import FakeCuda, fake_cuda  # noqa: F401  a fixture
from tests.host.helpers import make_spec

SECOND = torch.device("cuda", 1)
SPEC = make_spec(torch.float32)


@pytest.fixture
def cuda(fake_cuda: FakeCuda) -> Iterator[FakeCuda]:  # noqa: F811
    yield fake_cuda
    assert fake_cuda.current == 0, "the current device is the caller's own"


def test_events(cuda: FakeCuda) -> None:
    StreamEvent(SECOND).wait("a step")
    assert cuda.noted == [("record", 1)]


def test_copies_to_the_host(cuda: FakeCuda) -> None:
    with FakeTensorMode():
        AsyncHostCopy([torch.zeros(3, dtype=torch.int64, device=SECOND), torch.zeros(3, device=SECOND)])
    assert cuda.noted == [("record", 1)]


def test_throttle_of_the_layers(cuda: FakeCuda) -> None:
    throttle = LayerThrottle(SECOND)
    throttle.wait()
    throttle.wait()
    assert cuda.noted == [("record", 1)] * 2


def test_captured_graphs(cuda: FakeCuda) -> None:
    with FakeTensorMode():
        capture = CudaGraphCapture((4, 2, 3), torch.float32, SECOND)
        rows = torch.zeros(4, 6, device=SECOND)
        capture.full(lambda: rows + 1)
    assert cuda.noted == [("synchronize", 1), ("capture_begin", 1), ("capture_end", 1)]


def test_timer_waits(cuda: FakeCuda) -> None:
    Timer(SECOND, 1.0).time(lambda: None)
    assert cuda.noted == [("record", 1), ("synchronize", 1)] * 2


def test_memory_for_a_gpu_is_locked_and_unlocked_with_that_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise CUDA would begin a context on the first GPU, which takes memory there."""
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: cuda.noted.append(("lock", cuda.current)) or 0,
        cudaHostUnregister=lambda address: cuda.noted.append(("unlock", cuda.current)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    with torch.cuda.device(SECOND):
        pool = allocate_pool((4,), torch.uint8, pin_memory=True)
    del pool
    assert cuda.noted == [("lock", 1), ("unlock", 1)]


def test_host_tier_gets_its_memory_with_its_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made_on: list[tuple[int, bool]] = []

    def allocate(*_: Any, pin_memory: bool, cores: Any) -> Tensor:
        made_on.append((torch.cuda.current_device(), pin_memory))
        raise MemoryError("noted")

    monkeypatch.setattr(tier_module, "allocate_pool", allocate)
    for device in (SECOND, torch.device("cpu")):
        setup = HostTierSetup.of(EngineConfig(), num_threads=1, pin_memory=device.type == "cuda")
        with pytest.raises(MemoryError, match="noted"):
            HostTier(setup, spec=SPEC, dtype=torch.float32, device=device)
    assert made_on == [(1, True), (0, False)]


def test_kernels_of_moves_are_compiled_for_the_gpu_of_the_tier(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []

    def copy_blocks(k: Tensor, v: Tensor, pool: Tensor, *ids: Tensor, **options: bool) -> None:
        used.extend(tensor.device for tensor in (k, v, *ids))

    monkeypatch.setattr("omniserve.host.mover.kernels", lambda name: SimpleNamespace(copy_blocks=copy_blocks))
    pool = SimpleNamespace(dtype=torch.float32, shape=torch.Size((2, 5, 1, 2, 16, 8)), is_pinned=lambda: True)
    with FakeTensorMode(), torch.cuda.device(SECOND):
        DirectMover(pool)
    assert used == [SECOND] * 8
    assert cuda.noted == [("synchronize", 1)]


# Without an argument they ask, or act on, the current device.
OF_A_DEVICE = {
    "synchronize", "current_stream", "default_stream", "Stream", "device", "mem_get_info", "memory_allocated",
    "memory_reserved", "max_memory_allocated", "get_device_name", "get_device_capability", "get_device_properties",
}  # fmt: skip


def on_the_current_device(source: str) -> Iterator[str]:
    """Yield the calls of a module that do not say on which GPU."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        says_nothing = not call.args and not call.keywords
        if name.removeprefix("torch.cuda.") in OF_A_DEVICE and name.startswith("torch.cuda.") and says_nothing:
            yield ast.unparse(call)
        if name.endswith(".record") and says_nothing:
            yield ast.unparse(call)
        if name.endswith(".cuda") and says_nothing:
            yield ast.unparse(call)
        for keyword in call.keywords:
            if keyword.arg == "device" and ast.unparse(keyword.value) in ("'cuda'", "torch.device('cuda')"):
                yield ast.unparse(call)


def test_no_call_leaves_the_gpu_open() -> None:
    package = Path(__file__).parents[2] / "omniserve"
    found = {
        f"{path.relative_to(package)}: {call}"
        for path in package.rglob("*.py")
        for call in on_the_current_device(path.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.synchronize()", "event.record()", "torch.cuda.current_stream()", "torch.cuda.Stream()",
        "torch.zeros(3, device='cuda')", "torch.zeros(3, device=torch.device('cuda'))", "tensor.cuda()",
    ],
)  # fmt: skip
def test_calls_that_leave_the_gpu_open_are_found(call: str) -> None:
    assert list(on_the_current_device(f"def f():\n    {call}\n"))
