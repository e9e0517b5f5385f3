"""SchedulerLimits: what a policy may use of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.kv.base import CanEvict, KVManager
from omniserve.sched.options import PolicyOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """An engine's settings, and the numbers that follow from them, from its model and from its pools."""

    config: EngineConfig
    num_layers: int
    """L."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a request, unless it ignores them."""
    num_host_slots: int = 0
    """Most requests on the host tier; 0: there is none."""
    ls_reserve_blocks: int = 0
    """Device blocks that BE requests leave free."""
    checkpoint_blocks: int = 0
    """Most blocks of BE requests to checkpoint a step; 0: none."""

    @classmethod
    def of(
        cls, config: EngineConfig, options: PolicyOptions, spec: ModelSpec, kv: KVManager, *, max_model_len: int
    ) -> Self:
        """Return the limits of an engine; ``options`` are its policy's."""
        has_checkpoints = options.checkpoint_kv or isinstance(kv, CanEvict)
        return cls(
            config=config,
            num_layers=spec.num_layers,
            max_model_len=max_model_len,
            eos_token_ids=spec.eos_token_ids,
            num_host_slots=config.max_host_requests if kv.num_host_blocks else 0,
            ls_reserve_blocks=int(options.ls_reserve_fraction * kv.num_device_blocks),
            checkpoint_blocks=-(-config.max_num_batched_tokens // config.block_size) if has_checkpoints else 0,
        )
