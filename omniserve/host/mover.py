"""Mover: the interface of what moves KV between a CUDA cache and the host pool, and the code its two kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniserve.core.plan import HostEvent, HostEventKind, KVMove, MoveDirection


class Mover(ABC):
    """Runs moves beside the steps, in the order in which they were started. No method waits for the device.

    Each move ends with one event. Until then its blocks may be read or written on both sides.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        """Moves that failed on the device. Failures of the worker threads are counted by the threads."""
        self.bytes_moved = 0
        """Bytes of finished moves that were copied without the worker threads."""
        self._queue: deque[Any] = deque()  # the moves without their event, oldest first
        self._stream: torch.cuda.Stream | None = None  # None without CUDA, in tests, where everything happens at once
        self._closed = False

    @property
    def busy(self) -> bool:
        """True while there are moves without their event."""
        return bool(self._queue)

    @property
    def num_moves(self) -> int:
        """The number of moves without their event, except one that the worker threads are copying and so count."""
        return len(self._queue)

    @property
    @abstractmethod
    def can_advance(self) -> bool:
        """True when `advance` has something to do."""

    @abstractmethod
    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Queue a valid move behind the work of the current stream; the caller keeps the caches until its event."""

    @abstractmethod
    def advance(self) -> list[HostEvent]:
        """Start the copies that can start, and return the events of the moves that are over."""

    def takes(self, move_id: int, message: str) -> bool:
        """Tell whether an event of the worker threads is about a copy that this mover asked for, and note it then.

        `message` is the event's, empty unless the copy failed.
        """
        return False

    def close(self) -> None:
        """Let moves fail that are started from now on; the caller waits for the device."""
        self._closed = True

    def _follow_current_stream(self, device: torch.device) -> None:
        """Let the side stream wait for the work that the current stream has been given so far."""
        if device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def _when_done(self) -> Callable[[], bool]:
        """Return a function that tells whether the side stream has done all that it was given so far."""
        return self._stream.record_event().query if self._stream is not None else lambda: True


def end_of(move: KVMove, error: str) -> HostEvent:
    """Return the event that ends a move; `error` is empty unless it failed."""
    kind = HostEventKind.MOVE_FAILED if error else HostEventKind.MOVE_DONE
    return HostEvent(kind=kind, move_id=move.move_id, message=error)


def sides(move: KVMove) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a move's device blocks and its pool blocks."""
    ids = move.src_block_ids, move.dst_block_ids
    return ids if move.direction is MoveDirection.TO_HOST else ids[::-1]
