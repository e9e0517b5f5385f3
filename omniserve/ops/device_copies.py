"""Copies between the host and the device that neither of them waits for, and marks to wait for later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omniserve.ops.waiting import wait_for


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device; work that is launched from now on sees it.

    From pinned memory: a copy from pageable memory waits for all that the stream has been given.
    """
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def event_on(device: torch.device) -> torch.cuda.Event:
    """Return an event behind what a GPU's current stream has been given; the GPU need not be the current one."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class Download:
    """Tensors on their way to the host: one copy, begun at once, of what the current stream makes of them.

    Args:
        tensors: int64 or floating, all on one device; on the CPU they are taken as they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._packed: Tensor | None = None
        if self._tensors[0].device.type == "cuda":
            # float64 holds any shorter float exactly, and has the size of an int64.
            parts = [(t.double().view(torch.int64) if t.is_floating_point() else t).flatten() for t in self._tensors]
            packed = torch.cat(parts)
            self._packed = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._done = event_on(packed.device)

    def wait(self) -> list[Tensor]:
        """Return them on the host, floats as float64; waits for this copy and what came before it, for no more.

        Raises:
            Stalled: The device did not get there in time.
        """
        if self._packed is None:
            return self._tensors
        wait_for(self._done, "a step's tokens")
        parts = self._packed.split([t.numel() for t in self._tensors])
        return [
            (part.view(torch.float64) if t.is_floating_point() else part).view(t.shape)
            for part, t in zip(parts, self._tensors, strict=True)
        ]


class Mark:
    """A place in what the current stream is given, that the host can wait for.

    Args:
        device: The stream's; where it is no GPU, all has happened already.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = event_on(device)

    def wait(self) -> None:
        """Wait for what the stream was given before, and for no more.

        Raises:
            Stalled: The device did not get there in time.
        """
        if self._event is not None:
            wait_for(self._event, "a step")
