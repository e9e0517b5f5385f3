"""Waits for the device that have a deadline: one that takes longer than any step should raises ``Stalled``."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from omniserve.core.errors import Stalled

PATIENCE_S = 60.0
"""The longest wait for the device. Steps take milliseconds, the longest ones seconds, so work of a minute hangs."""

_SPIN_S = 200e-6  # a sleep takes 50 us longer than asked for, and most waits are shorter than this
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_SLEEP_SHARE = 1 / 32  # of the time waited so far: a long wait ends at most this share too late


class Event(Protocol):
    """A point in a device's work, such as a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Tell whether the device has reached it."""
        ...


def wait_for(event: Event, what: str, *, timeout_s: float | None = None, spins: bool = False) -> None:
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
