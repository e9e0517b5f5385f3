"""What a host tier has done and has in hand, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTierStats:
    """A snapshot. Counters run from the tier's start."""

    tasks_done: int
    """Counter: attention tasks that gave a result."""
    failures: int
    """Counter: attention tasks and moves that failed; cancelled tasks do not count."""
    threads_alive: int
    tasks_in_hand: int
    """Gauge: attention tasks expected, queued or running."""
    moves_in_hand: int
    busy_seconds: float
    """Counter: time that threads spent computing and copying, summed over threads."""
    kv_bytes_read: int
    """Counter: K and V bytes that attention went through."""
    bytes_moved: int
    """Counter: bytes that were copied for moves, in the model's dtype."""
    bytes_prefaulted: int
    """Counter, up to `pool_bytes`: bytes of the pool whose pages an idle-priority thread has touched, ahead of work.
    Stays 0 where there is nothing to do: page-locked memory is touched when it is allocated."""
    pool_bytes: int
    """K and V of the whole pool, scales not counted."""
