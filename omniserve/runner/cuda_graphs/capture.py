"""Capture of steps: run the layers of a step once, and get a function that runs them again on the same tensors.

As in vLLM a capture is FULL (one graph for the whole step) or PIECEWISE (a graph for each part between two attentions,
which themselves are launched one by one).

Legend: T device rows, P piggyback seats, N query heads, H head size, D hidden.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Attend = Callable[[int, Tensor], Tensor]
"""(layer, queries ``[T, N, H]``) -> attention rows ``[T, N * H]``."""
FullStep = Callable[[], Tensor]
"""Runs a step and returns its hidden states ``[T + P, D]``, valid until the next step."""
PiecewiseStep = Callable[[Attend], Tensor]
"""Runs a step with an attention that is given at each call, and returns its hidden states as a ``FullStep`` does."""


class Capture:
    """Captures steps that wait for nothing, and whose shapes and addresses do not depend on values.

    This one has no graphs and runs the step again each time, on any device: to compare with and to debug.
    """

    def full(self, run: FullStep) -> FullStep:
        """Capture a step with its attention."""
        return run

    def piecewise(self, run: PiecewiseStep) -> PiecewiseStep:
        """Capture the parts of a step between its attentions."""
        return run


@dataclass(frozen=True, slots=True)
class FullGraph:
    """A step captured with its attention."""

    replay: Callable[[], None]
    hidden_TD: Tensor
    run: FullStep
    """The captured function. It keeps alive the tensors that the graph reads, of which the graph has addresses only."""

    def __call__(self) -> Tensor:
        self.replay()
        return self.hidden_TD


@dataclass(frozen=True, slots=True)
class PiecewiseGraph:
    """A step captured between its attentions."""

    before_attention: tuple[tuple[Callable[[], None], int, Tensor], ...]
    """Replays in order, each with its layer and that layer's queries: the piece that makes the queries."""
    attn_TD: Tensor
    """The attention rows of a layer, which the piece behind the attention reads."""
    replay_last: Callable[[], None]
    """The replay of the piece after the last attention."""
    hidden_TD: Tensor
    run: PiecewiseStep
    """The captured function, kept as in ``FullGraph``."""

    def __call__(self, attend: Attend) -> Tensor:
        for replay, layer, q_TNH in self.before_attention:
            replay()
            self.attn_TD[: len(q_TNH)] = attend(layer, q_TNH)
        self.replay_last()
        return self.hidden_TD


class DeviceWorkCapture(Capture, ABC):
    """Captures the work that the device is given. The Python code that launches it runs twice, and never again.

    ``attention_shape`` is ``[T, N, H]`` of the queries, with the largest T that is captured in pieces.
    """

    def __init__(self, attention_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._q_TNH = torch.zeros(attention_shape, dtype=dtype, device=device)
        self._attn_TD = torch.zeros(attention_shape, dtype=dtype, device=device).flatten(1)

    @abstractmethod
    def _begin(self) -> None:
        """Begin to capture."""

    @abstractmethod
    def _end(self) -> Callable[[], None]:
        """End the capture; return a function that repeats the captured work."""

    def _capture(self, run: FullStep) -> tuple[Callable[[], None], Tensor]:
        """Return the replay of a step, or of the last of its pieces, and the hidden states that it writes."""
        self._begin()
        try:
            hidden_TD = run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # this error only says that the capture failed
                self._end()
            raise
        return self._end(), hidden_TD

    def full(self, run: FullStep) -> FullStep:
        run()  # compiles kernels, which must not happen in a capture
        replay, hidden_TD = self._capture(run)
        return FullGraph(replay, hidden_TD, run)

    def piecewise(self, run: PiecewiseStep) -> PiecewiseStep:
        pieces: list[tuple[Callable[[], None], int, Tensor]] = []

        def keep(layer: int, q_TNH: Tensor) -> Tensor:
            """Copy the queries away: a later piece may write to the memory in which they were made."""
            self._q_TNH[: len(q_TNH)].copy_(q_TNH)
            return self._attn_TD[: len(q_TNH)]

        def cut(layer: int, q_TNH: Tensor) -> Tensor:
            attn_TD = keep(layer, q_TNH)
            pieces.append((self._end(), layer, self._q_TNH[: len(q_TNH)]))
            self._begin()
            return attn_TD

        run(keep)  # compiles kernels
        replay_last, hidden_TD = self._capture(lambda: run(cut))
        return PiecewiseGraph(tuple(pieces), self._attn_TD, replay_last, hidden_TD, run)


class CudaGraphCapture(DeviceWorkCapture):
    """Captures CUDA graphs, which share one memory pool: one graph runs at a time, and pieces run in their order."""

    def __init__(self, attention_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(attention_shape, dtype, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def _capture(self, run: FullStep) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.stream(self._stream):  # this makes its device the current one, too
            return super()._capture(run)

    def _begin(self) -> None:
        # torch.cuda.graph would collect garbage and empty caches before each of hundreds of captures.
        torch.cuda.synchronize(self._stream.device)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def _end(self) -> Callable[[], None]:
        self._graph.capture_end()
        return self._graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which graphs are captured: cuBLAS keeps a workspace for every stream for ever."""
    return torch.cuda.Stream(device)
