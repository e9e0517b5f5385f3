"""Mover: the contract of what moves KV between a CUDA cache and the host pool, and what its two kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from omniserve.core.plan import HostEvent, HostEventKind, KVMove, MoveDirection


class Mover(ABC):
    """Runs moves, beside the steps, in the order in which they were started. Nothing waits for the device.

    Each move ends with one event. Until then somebody may read or write its blocks on both sides.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        """Moves that failed here; those that the worker threads failed are in their count."""
        self.bytes_moved = 0
        """Bytes copied without the worker threads' help, in moves that are over."""
        self._stream: torch.cuda.Stream | None = None  # none without CUDA, in tests: everything happens at once
        self._closed = False

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while there are moves."""

    @property
    @abstractmethod
    def num_moves(self) -> int:
        """Moves queued or running, not counting one whose copy the worker threads have in hand."""

    @property
    @abstractmethod
    def can_advance(self) -> bool:
        """True when `advance` has something to do."""

    @abstractmethod
    def start(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Queue a move behind what the current stream has been given so far.

        Args:
            move: Its ids are in range.
            device_k_LBKSH: Device cache, contiguous; kept alive by the caller until the move's event.
            device_v_LBKSH: Likewise.
        """

    @abstractmethod
    def advance(self) -> list[HostEvent]:
        """Start what can be started, and return the events of moves that are over."""

    def takes(self, move_id: int, message: str) -> bool:
        """Take a worker threads' event if it is of a copy that this mover asked for, and no caller's move.

        Args:
            move_id: The event's.
            message: Empty unless the copy failed.
        """
        return False

    def close(self) -> None:
        """Let moves that are started from here on fail; the caller waits for the device."""
        self._closed = True

    def _follow_current_stream(self, device: torch.device) -> None:
        """Let the side stream wait for what the current one has been given so far."""
        if device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def _when_done(self) -> Callable[[], bool]:
        """Return what tells when the side stream has done what it was given so far."""
        return self._stream.record_event().query if self._stream is not None else lambda: True


def end_of(move: KVMove, error: str) -> HostEvent:
    """Return a move's event; `error` is empty unless it failed."""
    kind = HostEventKind.MOVE_FAILED if error else HostEventKind.MOVE_DONE
    return HostEvent(kind=kind, move_id=move.move_id, message=error)


def sides(move: KVMove) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a move's device blocks and its pool blocks."""
    if move.direction is MoveDirection.TO_HOST:
        return move.src_block_ids, move.dst_block_ids
    return move.dst_block_ids, move.src_block_ids
