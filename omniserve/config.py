"""EngineConfig: every setting of an engine. Plain data, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from omniserve.request import SLO, ServiceClass
from omniserve.spec import HOST_KV_DTYPES

GIB = 1 << 30


def _default_slos() -> Mapping[ServiceClass, SLO]:
    return MappingProxyType({ServiceClass.LS: SLO(ttft_s=1.0, tpot_s=0.1), ServiceClass.BE: SLO()})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Raises:
        ValueError: A setting is out of its range; the message says which and what to give instead.
    """

    scheduler: str = "omniserve"
    """Name in SCHEDULERS, or ``package.module:Class``."""
    kv: str = "tiered"
    """Name in KV_MANAGERS (``paged``: device only; ``tiered``: device and host), or ``package.module:Class``."""
    attention: str = "auto"
    """Name in DEVICE_ATTENTION; ``auto`` takes the best that this device has."""

    device_kv_bytes: int = 1 * GIB
    """Memory for the device tier's KV pool."""
    host_kv_bytes: int = 1 * GIB
    """Memory for the host tier's KV pool; 0 switches the host tier off."""
    host_kv_dtype: str = "auto"
    """``auto``: the host pool is in the model's dtype, and its outputs are the device tier's. ``int8``: half the bytes
    or less (a scale per token and KV head included), so that about twice the tokens fit. Its
    outputs are not exact: K and V are rounded, by up to 0.4 % of their row's largest value, as they come to the host
    tier, and stay so if they go back."""
    block_size: int = 64
    """Tokens per KV block, on both tiers; a power of two."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's."""

    max_step_tokens: int = 512
    """Most device rows in a step (the token budget of chunked prefill)."""
    max_num_requests: int = 256
    """Most requests that hold device KV at a time (BE requests do not count against LS ones)."""
    max_host_requests: int = 256
    """Slots of the host tier: most requests that decode there at a time."""
    max_piggyback_slots: int = 32
    """Largest P: most piggyback rows a layer."""
    max_piggyback_rows: int | None = None
    """Most piggyback rows in a step over all layers; None: P in every layer."""
    ls_reserve_fraction: float = 0.05
    """Share of the device blocks that BE requests leave free for LS ones, in [0, 1)."""
    swap_in_delay_steps: int = 16
    """Steps that memory must have been light before BE KV moves back to the device (omniserve 3.2.4)."""

    device_threads: int | None = None
    """CPU threads of the device tier while the host tier is idle; None: all cores (no effect on a GPU's kernels)."""
    host_threads: int | None = None
    """Host tier threads; None: half the cores without a GPU, all but two with one."""
    host_cores: tuple[int, ...] | None = None
    """Cores that host threads are pinned to; None: not pinned."""

    compile: bool = True
    """torch.compile the dense halves; False runs the same code eagerly."""
    slos: Mapping[ServiceClass, SLO] = field(default_factory=_default_slos)
    """Objectives of requests that bring none of their own."""
    seed: int = 0
    """Seeds the sampling of requests that have no seed of their own."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.host_kv_dtype not in HOST_KV_DTYPES:
            raise ValueError(f"host_kv_dtype must be one of {', '.join(HOST_KV_DTYPES)}, got {self.host_kv_dtype!r}")
        if not (math.isfinite(self.ls_reserve_fraction) and 0 <= self.ls_reserve_fraction < 1):
            raise ValueError(f"ls_reserve_fraction must be in [0, 1), got {self.ls_reserve_fraction}")
        for name, low in (
            ("device_kv_bytes", 1), ("host_kv_bytes", 0), ("max_step_tokens", 1), ("max_num_requests", 1),
            ("max_host_requests", 1), ("max_piggyback_slots", 1), ("swap_in_delay_steps", 0),
        ):  # fmt: skip
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be >= {low}, got {getattr(self, name)}")
        for name in ("device_threads", "host_threads", "max_model_len", "max_piggyback_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1 or None, got {value}")
        if missing := set(ServiceClass) - set(self.slos):
            raise ValueError(f"slos needs an entry for every service class; missing: {sorted(missing)}")
