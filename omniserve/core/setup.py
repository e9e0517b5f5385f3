"""RunnerSetup: what a runner is made with, the same on all ranks of a model. Plain data, made once for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omniserve.core.config import EngineConfig

MOST_TASK_ROWS = 16
"""Rows that a task of the host tier can have (``kMaxTaskRows`` in ``ops/csrc/host_tier.h``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTierSetup:
    """Sizes of a host tier.

    Raises:
        ValueError: A size is out of range.
    """

    block_size: int
    """Tokens per block."""
    kv_bytes: int
    """Size of the pool, which is ``kv_bytes // spec.host_block_bytes(block_size, kv_dtype)`` blocks."""
    kv_dtype: str = "auto"
    """Dtype of K and V in the pool. ``auto``: the model's dtype, and results are exact. ``int8``: K and V are rounded
    to int8, with a scale per token and KV head: about twice the tokens fit, and reading takes about half the time."""
    cache_dtype: str = "auto"
    """Dtype of K and V in the device's cache, from and to which moves copy: ``auto``, or ``int8`` if the pool's is."""
    num_slots: int
    """The number of requests that can have a task on the tier at the same time."""
    max_rows: int = 1
    """The highest number of consecutive tokens that a task may have, in [1, MOST_TASK_ROWS]."""
    num_threads: int
    """The number of worker threads."""
    cores: tuple[int, ...] | None = None
    """Thread i is pinned to ``cores[i % len(cores)]``; with None no thread is pinned."""
    pin_memory: bool = False
    """The tier's memory is page-locked, which a CUDA device tier needs."""
    mailbox: bool = False
    """The tier has a mailbox for rows, and a thread that watches the flags of expected tasks."""
    mailbox_spin_s: float = 200e-6
    """The watching thread spins for this long after the last flag or ``expect``."""
    mailbox_sleep_s: float = 20e-6
    """Seconds that the watching thread then sleeps between two looks. It sleeps while nothing is expected."""
    patience_s: float = 10.0
    """The tier counts as stalled when it has work in hand and makes no progress for this long."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_slots", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.cache_dtype == "int8" and self.kv_dtype != "int8":
            raise ValueError(
                "a cache of int8 needs a host pool of int8, whose codes are then copied: set kv_dtype to int8"
            )
        if not 1 <= self.max_rows <= MOST_TASK_ROWS:
            raise ValueError(f"max_rows must be in [1, {MOST_TASK_ROWS}], got {self.max_rows}")

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        num_threads: int,
        max_rows: int = 1,
        pin_memory: bool = False,
        mailbox: bool = False,
    ) -> Self:
        """Return the sizes that an engine's settings ask for."""
        return cls(
            block_size=config.block_size,
            kv_bytes=config.host_kv_bytes,
            kv_dtype=config.host_pool_dtype,
            cache_dtype=config.execution.kv_dtype,
            num_slots=config.max_host_requests,
            max_rows=max_rows,
            num_threads=num_threads,
            cores=config.host_cores,
            pin_memory=pin_memory,
            mailbox=mailbox,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSetup:
    """An engine's settings, and the numbers that a runner needs beside them."""

    config: EngineConfig
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    num_device_blocks: int
    """Blocks of the device pool that a KV manager may use."""
    num_host_blocks: int
    """Blocks of the host pool likewise; 0: there is no host tier."""
    num_state_slots: int
    """Most requests with recurrent states; 0: the model has none."""
    host_tier: HostTierSetup | None
    """Sizes of each rank's host tier; None: there is none."""
    engine_id: str
    """Name by which CPU hosts on the network know the engine, the same on all of its ranks and on no other engine."""
    is_directed: bool
    """KV blocks may run from the right."""
    keeps_halted: bool
    """Rows that left a step between two layers go on where they left; else they begin anew."""
    has_safepoints: bool
    """Rows may leave a step between two layers."""
    safepoint_every: int
    """Number of layers from one such place to the next."""
    awaits_host: bool
    """Steps may have rows that wait for the host tier in each layer."""
    overlaps: bool
    """A step is launched while the one before it runs, so that each rank needs the tokens that rank 0 samples."""
    in_stages: bool
    """Steps run side by side, each in another stage of a pipeline; never with ``overlaps``."""

    @property
    def depth(self) -> int:
        """Number of steps in flight with which the oldest is collected."""
        return self.config.parallel.pipeline_parallel_size if self.in_stages else 1 + self.overlaps
