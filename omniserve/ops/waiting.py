"""Waits for the device that end: if it takes longer than any step ever should, they raise ``Stalled``."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from omniserve.core.errors import Stalled

PATIENCE_S = 60.0
"""The longest wait for the device. Steps take milliseconds, the longest ones seconds: what takes a minute hangs."""

_SPIN_S = 200e-6  # a sleep takes 50 us more than was asked for, and most of what is waited for is this near
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_SLEEP_SHARE = 1 / 32  # of what was waited for already: so much later, at most, is the end of a long wait seen


class Event(Protocol):
    """A place in what a device was given; a ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Tell whether the device has got there."""
        ...


def wait_for(event: Event, what: str, *, timeout_s: float | None = None, spins: bool = False) -> None:
    """Wait until the device has got to an event.

    The thread spins for a moment, then it sleeps between two looks: it takes no core from the host tier.

    Args:
        event: The event, recorded.
        what: What the device does until then, for the error.
        timeout_s: Longest wait; None: ``PATIENCE_S``.
        spins: Look without a rest. For measurements, which a sleep would lengthen.

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
    """Wait for all that a device was given, on whatever stream; without a GPU there is nothing to wait for.

    Args:
        device: The device.
        spins: See ``wait_for``.

    Raises:
        Stalled: The device did not finish in time what the current stream was given.
        RuntimeError: The device has failed.
    """
    if device.type != "cuda":
        return
    wait_for(torch.cuda.current_stream(device).record_event(), "all that it was given", spins=spins)
    torch.cuda.synchronize(device)  # the other streams: copies, and what the current stream waited for or began
