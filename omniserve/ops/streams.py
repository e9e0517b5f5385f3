"""Copies between the host and the device that neither of them waits for, and waits for the device, with a deadline.

A wait that takes longer than any step should raises ``Stalled``.

Every wait for the device and for the host tier's threads (``host/progress.py``) has a deadline, but those inside
torch's own calls. The error names what hangs, and the server starts the engine again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from omniserve.core.errors import Stalled

PATIENCE_S = 60.0
"""The longest wait for the device. Steps take milliseconds, the longest ones seconds, so work of a minute hangs."""

_SPIN_S = 200e-6  # a sleep takes 50 us longer than asked for, and most waits are shorter than this
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_SLEEP_SHARE = 1 / 32  # of the time waited so far: a long wait ends at most this share too late


def wait_for(event: torch.cuda.Event, what: str, *, timeout_s: float | None = None, spins: bool = False) -> None:
    """Wait until the device has reached an event; ``what`` names the work before it in the error.

    The thread first spins, then sleeps between two looks, so that it takes no core from the host tier. With ``spins``
    it never sleeps, because a sleep would lengthen a measurement. The deadline is ``PATIENCE_S`` by default.

    Raises:
        Stalled: The device did not get there in time.
    """
    if event.query():
        return
    timeout_s = PATIENCE_S if timeout_s is None else timeout_s
    began_s = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            raise Stalled(
                f"the device has not finished {what} within {timeout_s:g} s: a kernel or a copy hangs, or the device "
                "is gone; look at nvidia-smi and at the kernel log (Xid), and start the process again"
            )
        if waited_s > _SPIN_S and not spins:
            time.sleep(min(max(waited_s * _SLEEP_SHARE, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))


def drain(device: torch.device, *, spins: bool = False) -> None:
    """Wait for the work of all streams of a GPU; on a CPU there is nothing to wait for. ``spins`` as in ``wait_for``.

    Raises:
        Stalled: The device did not finish the work of the current stream in time.
        RuntimeError: The device has failed.
    """
    if device.type != "cuda":
        return
    wait_for(torch.cuda.current_stream(device).record_event(), "all that it was given", spins=spins)
    torch.cuda.synchronize(device)  # the other streams: copies, and work before or behind the current stream's


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
