"""Recorders: run the layers of a step once, and get something that runs them again on the same tensors.

Legend: T device rows, P piggyback seats, N query heads, H head size, D hidden.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from omniserve.runner.cuda_graphs.layers import Pieces, finish

Result = TypeVar("Result")
Attend = Callable[[int, Tensor], Tensor]
"""(layer, queries ``[T, N, H]``) -> attention rows ``[T, N * H]``."""


class Recorder(Protocol):
    """Makes replays. What is recorded waits for nothing, and its shapes and addresses do not depend on values."""

    def whole(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return what runs a step again and returns its hidden states ``[T + P, D]``, valid until the next replay."""
        ...

    def in_pieces(self, start: Callable[[], Pieces]) -> Callable[[Attend], Tensor]:
        """Return the same for a step whose attention is not recorded but given at each replay."""
        ...


class PlainRecorder:
    """Does the same work anew each time: constant shapes on any device, to compare with and to debug."""

    def whole(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run

    def in_pieces(self, start: Callable[[], Pieces]) -> Callable[[Attend], Tensor]:
        return lambda attend: finish(start(), attend)


class DeviceWorkRecorder(ABC):
    """Records what the device is given to do; the Python code around it runs once.

    Args:
        attention_shape: ``[T, N, H]`` with the largest T that is recorded in pieces.
        dtype: Of queries and attention rows.
        device: Where they are.
    """

    def __init__(self, attention_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._q_TNH = torch.zeros(attention_shape, dtype=dtype, device=device)
        self._attn_TD = torch.zeros(attention_shape, dtype=dtype, device=device).flatten(1)

    @abstractmethod
    def _record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Run; return what does its device work again, and its result, whose tensors that work writes to."""

    def whole(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()  # compiles kernels, which a recording may not
        work, hidden_TD = self._record(run)

        def replay(keeps: object = run) -> Tensor:  # a recording has addresses: what it reads must live as long
            work()
            return hidden_TD

        return replay

    def in_pieces(self, start: Callable[[], Pieces]) -> Callable[[Attend], Tensor]:
        finish(start(), lambda layer, q_TNH: self._attn_TD[: len(self._keep(q_TNH))])
        pieces = start()
        recorded: list[tuple[Callable[[], None], int, Tensor]] = []
        before: Tensor | None = None  # what the piece begins with
        while True:
            work, result = self._record(partial(self._next_piece, pieces, before))
            if isinstance(result, Tensor):
                break
            recorded.append((work, *result))
            before = self._attn_TD[: len(result[1])]
        last, hidden_TD = work, result

        def replay(attend: Attend, keeps: object = start) -> Tensor:
            for work, layer, q_TNH in recorded:
                work()
                self._attn_TD[: len(q_TNH)] = attend(layer, q_TNH)
            last()
            return hidden_TD

        return replay

    def _next_piece(self, pieces: Pieces, before: Tensor | None) -> tuple[int, Tensor] | Tensor:
        try:
            layer, q_TNH = next(pieces) if before is None else pieces.send(before)
        except StopIteration as end:
            hidden_TD: Tensor = end.value
            return hidden_TD
        return layer, self._keep(q_TNH)

    def _keep(self, q_TNH: Tensor) -> Tensor:
        """Let queries wait for their attention: where they were made, a later piece makes something else."""
        waiting_TNH = self._q_TNH[: len(q_TNH)]
        waiting_TNH.copy_(q_TNH)
        return waiting_TNH


class GraphRecorder(DeviceWorkRecorder):
    """CUDA graphs. They share one memory pool, as only one of them runs at a time, and pieces in their order."""

    def __init__(self, attention_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(attention_shape, dtype, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def _record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it collects garbage and empties caches before each of hundreds of recordings.
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):  # its device is then the current one, too
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it says that the capture failed, not why
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, result


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that graphs are captured on: cuBLAS keeps a workspace for each, for good."""
    return torch.cuda.Stream(device)
