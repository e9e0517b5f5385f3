"""Every rule of the watch bites, and what is allowed is let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omniserve.ops.cuda import kernels
from omniserve.ops.streams import AsyncHostCopy, StreamEvent, upload
from tests.fake_cuda.runtime import FakeRuntime, RuleBroken
from tests.fake_cuda.watch import is_on_device

CUDA = torch.device("cuda")


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=CUDA)


STEPS: dict[str, tuple[str, Callable[[], Any]]] = {
    "item": ("waits for values", lambda: ones(1).item()),
    "truth": ("waits for values", lambda: bool(ones(1) > 0)),
    "int": ("waits for values", lambda: int(ones(1))),
    "tolist": ("blocking download", lambda: ones(3).tolist()),
    "cpu": ("blocking download", lambda: ones(3).cpu()),
    "copy_to_host": ("blocking download", lambda: torch.zeros(3).copy_(ones(3))),
    "download_to_pageable": ("not page-locked", lambda: torch.zeros(3).copy_(ones(3), non_blocking=True)),
    "to_host_without_pinning": ("not page-locked", lambda: ones(3).to("cpu", non_blocking=True)),
    "tensor_from_list": ("blocking upload", lambda: torch.tensor([1, 2], device=CUDA)),
    "upload_of_pageable": ("not page-locked", lambda: torch.zeros(3).to(CUDA, non_blocking=True)),
    "blocking_upload": ("blocking upload", lambda: torch.zeros(3).pin_memory().to(CUDA)),
    "upload_and_cast": (
        "changes the dtype", lambda: torch.zeros(3).pin_memory().to(CUDA, torch.float64, non_blocking=True)
    ),
    "index_on_host": ("meets one on the device", lambda: ones(3)[torch.tensor([0, 2])]),
    "meeting": ("meets one on the device", lambda: ones(3) + torch.zeros(3)),
    "list_index": ("blocking upload", lambda: ones(3)[[0, 2]]),
    "mask": ("by a mask", lambda: ones(3)[ones(3) > 0]),
    "masked_assignment": ("by a mask", lambda: ones(3).__setitem__(ones(3) > 0, 0.0)),
    "nonzero": ("waits for values", lambda: ones(3).nonzero()),
    "masked_select": ("waits for values", lambda: ones(3).masked_select(ones(3) > 0)),
    "unique": ("waits for values", lambda: ones(3).unique()),
    "repeat_interleave": ("waits for values", lambda: ones(3).repeat_interleave(ones(3, dtype=torch.int64))),
    "host_operator": ("no kernel for CUDA", lambda: torch.ops.omniserve.packed_rows(ones(1), ones(1, 8, 32), 8, 4)),
    "event_never_recorded": ("never recorded", lambda: torch.cuda.Event().synchronize()),
}  # fmt: skip


@pytest.mark.parametrize("name", list(STEPS))
def test_what_no_step_may_do(name: str, gpu: FakeRuntime) -> None:
    message, broken = STEPS[name]
    with pytest.raises(RuleBroken, match=message):
        broken()
    (kept,) = gpu.violations
    assert message in kept, "it is known also where an exception is caught"
    gpu.violations.clear()


WAITS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.cuda.synchronize(),
    "stream": lambda: torch.cuda.Stream().synchronize(),
    "event": lambda: StreamEvent(CUDA).wait("a step"),
    "download": lambda: AsyncHostCopy([ones(3)]).wait(),
}


@pytest.mark.parametrize("name", list(WAITS))
def test_a_launch_may_not_wait(name: str, gpu: FakeRuntime) -> None:
    WAITS[name]()  # the host may wait for a step's end
    with gpu.never_waiting(), pytest.raises(RuleBroken, match="waits for the device"):
        WAITS[name]()
    gpu.violations.clear()


def recorded_event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


OUTSIDE = torch.zeros(3)
CAPTURES: dict[str, tuple[str, Callable[[], Any]]] = {
    "read": ("waits for values", lambda: ones(1).item()),
    "upload": ("page-locked memory in a capture", lambda: upload(OUTSIDE, CUDA)),
    "pinned_memory": ("page-locked memory in a capture", lambda: torch.empty(3, pin_memory=True)),
    "cpu_tensor": ("a tensor on the CPU in a capture", lambda: torch.arange(3)),
    "cpu_scalar": ("a CPU scalar in a capture", lambda: ones(3) * torch.tensor(2.0)),
    "tensor_from_list": ("torch.tensor in a capture", lambda: torch.tensor([1.0], device=CUDA)),
    "synchronize": ("synchronize in a capture", lambda: torch.cuda.synchronize()),
    "stream_synchronize": ("synchronize of stream side in a capture", lambda: torch.cuda.Stream().synchronize()),
    "stream_query": ("query of stream side in a capture", lambda: torch.cuda.Stream().query()),
    "event_query": ("query of an event in a capture", lambda: recorded_event().query()),
    "event_synchronize": ("synchronize of an event in a capture", lambda: recorded_event().synchronize()),
    "capture": ("a capture inside of a capture", lambda: torch.cuda.CUDAGraph().capture_begin()),
}


def capture(work: Callable[[], Any]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        work()
        graph.capture_end()
    return graph


@pytest.mark.parametrize("name", list(CAPTURES))
def test_what_no_capture_may_hold(name: str, gpu: FakeRuntime) -> None:
    message, broken = CAPTURES[name]
    with gpu.lenient(), pytest.raises(RuleBroken, match=message):
        capture(broken)
    gpu.violations.clear()


def test_a_capture_may_not_copy_from_the_host(gpu: FakeRuntime) -> None:
    pinned = torch.zeros(3).pin_memory()
    with gpu.lenient(), pytest.raises(RuleBroken, match="a copy between host and device in a capture"):
        capture(lambda: pinned.to(CUDA, non_blocking=True))
    gpu.violations.clear()


def test_a_capture_has_a_stream_of_its_own(gpu: FakeRuntime) -> None:
    with pytest.raises(RuleBroken, match="on the default stream"):
        torch.cuda.CUDAGraph().capture_begin()

    def elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            ones(3)

    with pytest.raises(RuleBroken, match="ones on stream side while side is captured"):
        capture(elsewhere)
    with pytest.raises(RuleBroken, match="never captured"):
        torch.cuda.CUDAGraph().replay()
    gpu.violations.clear()


def test_a_kernel_is_given_what_it_can_read(gpu: FakeRuntime) -> None:
    rows = kernels("rows")
    source, target, slots = torch.zeros(4, 8), ones(4, 8), ones(2, dtype=torch.int64)
    with pytest.raises(RuleBroken, match="_gather_kernel cannot read source"):
        rows.gather_rows(source, slots, target)
    rows.gather_rows(source.pin_memory(), slots, target)
    with pytest.raises(ValueError, match=r"destination must be .*with contiguous rows"):
        rows.gather_rows(source.pin_memory(), slots, ones(8, 4).T)
    with pytest.raises(TypeError, match="missing a required argument"):
        rows._gather_kernel[1,](source)
    with pytest.raises(RuleBroken, match="launched on a grid"):
        rows._gather_kernel[0,](source)
    gpu.violations.clear()


def test_what_a_step_may_do(gpu: FakeRuntime) -> None:
    with gpu.never_waiting():
        on_device = upload(torch.arange(3), CUDA)
        assert is_on_device(on_device) and on_device.dtype is torch.int64
        download = AsyncHostCopy([on_device, on_device.double()])
        on_device[:2].index_copy_(0, on_device[:1], on_device[1:2])
        graph = capture(lambda: on_device.add_(1).masked_fill_(on_device > 2, 0))
        graph.replay()
    assert [part.tolist() for part in download.wait()] == [[0, 0, 0], [0.0, 0.0, 0.0]]
    assert not gpu.violations and gpu.num_replays == 1
    assert graph.launches == {"aten::add_": 1, "aten::gt": 1, "aten::masked_fill_": 1}


@pytest.mark.parametrize("num_rows", [3, 300])
def test_a_capture_may_hold_adapters_of_any_slots(num_rows: int, gpu: FakeRuntime) -> None:
    stacks = ones(4, 8, 40), ones(4, 30, 8), ones(4)
    slots = ones(num_rows, dtype=torch.int32)
    results = []

    def add() -> None:
        y, x = ones(num_rows, 60)[:, ::2], ones(1, num_rows, 40)
        results.append(torch.ops.omniserve.add_lora(y, x, slots, *stacks))

    add()
    graph = capture(add)
    assert graph.launches["_shrink_kernel"] == graph.launches["_expand_kernel"] == 1
    for result in results:
        assert is_on_device(result) and result.shape == (num_rows, 30) and result.is_contiguous()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has the real CUDA")
def test_nothing_is_left_behind(device_guard: None) -> None:
    """The other tests of this folder leave nothing behind either, in whatever order they run."""
    assert not torch.cuda.is_available() and not torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 0 and isinstance(torch.cuda.Stream, type)
    assert not is_on_device(torch.zeros(3)) and torch.zeros(3).sum().item() == 0
