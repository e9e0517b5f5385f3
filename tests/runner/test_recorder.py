"""CUDA graphs do what the same code does without them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from omniserve.runner.cuda_graphs.recorder import DeviceWorkRecorder, GraphRecorder, PlainRecorder, Result
from tests.runner.tape import TapeRecorder

SHAPE = (4, 2, 3)  # T, N, H


class Toy:
    """Two layers with attention of their own between matrix products, over inputs that change."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.zeros(4, 6, device=device)
        self.weights = [torch.randn(6, 6, generator=generator).to(device) for _ in range(2)]

    def pieces(self):
        hidden = self.x * 1.5
        for layer, weight in enumerate(self.weights):
            attn = yield layer, (hidden @ weight).view(*SHAPE)
            hidden = hidden + attn
        return hidden

    def whole(self) -> torch.Tensor:
        hidden = self.x * 1.5
        for weight in self.weights:
            hidden = hidden + torch.tanh(hidden @ weight)
        return hidden


@pytest.mark.parametrize("which", ["tape", pytest.param("graph", marks=pytest.mark.gpu)])
def test_replays_follow_their_inputs(which: str) -> None:
    device = "cuda" if which == "graph" else "cpu"
    toy = Toy(device)
    recorder = (GraphRecorder if which == "graph" else TapeRecorder)(SHAPE, torch.float32, torch.device(device))
    plain = PlainRecorder()

    def attend(layer: int, q_TNH: torch.Tensor) -> torch.Tensor:
        return torch.tanh(q_TNH.flatten(1) + layer)

    with torch.inference_mode():
        whole, in_pieces = recorder.whole(toy.whole), recorder.in_pieces(toy.pieces)
        for seed in range(5):
            toy.x.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
            torch.testing.assert_close(whole(), plain.whole(toy.whole)())
            torch.testing.assert_close(in_pieces(attend), plain.in_pieces(toy.pieces)(attend))


class Forgetful(DeviceWorkRecorder):
    """Keeps nothing of what it recorded: a CUDA graph keeps addresses."""

    def _record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        return (lambda: None), run()


def test_what_a_recording_reads_lives_as_long_as_it() -> None:
    recorder = Forgetful(SHAPE, torch.float32, torch.device("cpu"))

    def recorded() -> tuple[Callable[..., torch.Tensor], weakref.ref[Toy]]:
        toy = Toy("cpu")
        return recorder.whole(lambda: toy.whole()), weakref.ref(toy)

    def recorded_in_pieces() -> tuple[Callable[..., torch.Tensor], weakref.ref[Toy]]:
        toy = Toy("cpu")
        return recorder.in_pieces(lambda: toy.pieces()), weakref.ref(toy)

    for record in (recorded, recorded_in_pieces):
        replay, inputs = record()
        gc.collect()
        assert inputs() is not None, "its memory would be somebody else's at the next replay"
        del replay
        gc.collect()
        assert inputs() is None
