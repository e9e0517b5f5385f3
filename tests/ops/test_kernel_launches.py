"""Every launch is on the device of its tensors, whatever device is current."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from omniserve.ops.kernels import attention, blocks, lora, mailbox, rows
from tests.ops.compile_cases import DEVICES, cases

KERNELS = [
    (module, name)
    for module in (attention, blocks, lora, mailbox, rows)
    for name, value in vars(module).items()
    if hasattr(value, "run") and hasattr(value, "fn")  # what triton.jit makes
    if value not in (lora._adapters_of, lora._next_adapter, mailbox._larger)  # which run inside others
]


def test_every_kernel_is_launched_with_its_tensors_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.Tensor] = []
    launched: set[str] = set()

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                assert current, f"{self.name} is launched on whatever device is current"
                launched.add(self.name)

            return launch

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorder(name))
    for launch in cases().values():
        launch(DEVICES[90])
    assert launched == {name for _, name in KERNELS} and len(launched) == 10 and not current
