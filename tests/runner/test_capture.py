"""CUDA graphs do what the same code does without them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from omniserve.runner.cuda_graphs.capture import Attend, Capture, CudaGraphCapture, DeviceWorkCapture
from tests.runner.tape import TapeCapture

SHAPE = (4, 2, 3)  # T, N, H


class Toy:
    """Two layers with attention of their own between matrix products, over inputs that change."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.zeros(4, 6, device=device)
        self.weights = [torch.randn(6, 6, generator=generator).to(device) for _ in range(2)]

    def run(self, attend: Attend) -> torch.Tensor:
        hidden = self.x * 1.5
        for layer, weight in enumerate(self.weights):
            hidden = hidden + attend(layer, (hidden @ weight).view(*SHAPE))
        return hidden

    def decode(self) -> torch.Tensor:
        hidden = self.x * 1.5
        for weight in self.weights:
            hidden = hidden + torch.tanh(hidden @ weight)
        return hidden


@pytest.mark.parametrize("which", ["tape", pytest.param("graph", marks=pytest.mark.gpu)])
def test_replays_follow_their_inputs(which: str) -> None:
    device = "cuda" if which == "graph" else "cpu"
    toy = Toy(device)
    capture = (CudaGraphCapture if which == "graph" else TapeCapture)(SHAPE, torch.float32, torch.device(device))
    plain = Capture()

    def attend(layer: int, q_TNH: torch.Tensor) -> torch.Tensor:
        return torch.tanh(q_TNH.flatten(1) + layer)

    with torch.inference_mode():
        full, piecewise = capture.full(toy.decode), capture.piecewise(toy.run)
        for seed in range(5):
            toy.x.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
            torch.testing.assert_close(full(), plain.full(toy.decode)())
            torch.testing.assert_close(piecewise(attend), plain.piecewise(toy.run)(attend))


class Forgetful(DeviceWorkCapture):
    """Keeps nothing of what it captured: a CUDA graph keeps addresses."""

    def _begin(self) -> None:
        pass

    def _end(self) -> Callable[[], None]:
        return lambda: None


def test_what_a_graph_reads_lives_as_long_as_it() -> None:
    capture = Forgetful(SHAPE, torch.float32, torch.device("cpu"))

    def full() -> tuple[Callable[..., torch.Tensor], weakref.ref[Toy]]:
        toy = Toy("cpu")
        return capture.full(lambda: toy.decode()), weakref.ref(toy)

    def piecewise() -> tuple[Callable[..., torch.Tensor], weakref.ref[Toy]]:
        toy = Toy("cpu")
        return capture.piecewise(lambda attend: toy.run(attend)), weakref.ref(toy)

    for make in (full, piecewise):
        replay, inputs = make()
        gc.collect()
        assert inputs() is not None, "its memory would be somebody else's at the next replay"
        del replay
        gc.collect()
        assert inputs() is None
