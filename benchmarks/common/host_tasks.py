"""Tasks of a host tier, without an engine."""

from __future__ import annotations

import time

from torch import Tensor

from omniserve.core.work import AttentionResult
from omniserve.host.tier import HostTier


def seconds_of_tasks(
    tier: HostTier, num_tasks: int, layer: int, slots: Tensor, q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor
) -> float:
    """Send rows, and return the seconds until all tasks that they make have their results.

    Raises:
        RuntimeError: A task failed.
    """
    left, began_s = num_tasks, time.perf_counter()
    tier.submit(layer, slots, q_RNH, k_RKH, v_RKH)
    while left > 0:
        tier.wait(1.0)
        for event in tier.poll():
            if not (isinstance(event, AttentionResult) and event.ok):
                raise RuntimeError(f"host attention failed: {event}")
            left -= 1
    return time.perf_counter() - began_s
