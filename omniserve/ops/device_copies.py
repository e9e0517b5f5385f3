"""Copies between the host and the device that neither of them waits for, and events that the host can wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omniserve.ops.waiting import wait_for


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on a device; all work that is launched from now on sees it.

    The copy is from pinned memory: one from pageable memory would wait for all work of the stream.
    """
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class StreamEvent:
    """An event behind the work that a device's current stream has been given; on a CPU it has happened already."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))  # the GPU need not be the current one

    def wait(self, what: str) -> None:
        """Wait for the work before the event, and for no other; `what` names it in the error.

        Raises:
            Stalled: The device did not finish it in time.
        """
        if self._event is not None:
            wait_for(self._event, what)


class AsyncHostCopy:
    """Copies int64 and floating tensors of one device to the host. CPU tensors are returned as they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._packed: Tensor | None = None
        if self._tensors[0].device.type == "cuda":
            # All go in one copy. float64 holds any shorter float exactly, and has the size of an int64.
            parts = [(t.double().view(torch.int64) if t.is_floating_point() else t).flatten() for t in self._tensors]
            packed = torch.cat(parts)
            self._packed = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._done = StreamEvent(packed.device)

    def wait(self) -> list[Tensor]:
        """Wait for the copy, but for no later work, and return the host tensors; floats are float64 then.

        Raises:
            Stalled: The device did not finish the copy in time.
        """
        if self._packed is None:
            return self._tensors
        self._done.wait("a step's tokens")
        parts = self._packed.split([t.numel() for t in self._tensors])
        return [
            (part.view(torch.float64) if t.is_floating_point() else part).view(t.shape)
            for part, t in zip(parts, self._tensors, strict=True)
        ]
