"""SchedulerLimits: what a policy may use of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omniserve.core.config import EngineConfig
from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.core.spec import ModelSpec
from omniserve.sched.options import PolicyOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """What a policy may use; taken from EngineConfig and ModelSpec, so that a policy sees neither."""

    num_layers: int
    """L."""
    block_size: int
    """Tokens per KV block."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    classes: tuple[ClassSpec, ...] = (
        ClassSpec(name=ServiceClass.LS, kind=ServiceClass.LS),
        ClassSpec(name=ServiceClass.BE, kind=ServiceClass.BE),
    )
    """Highest priority first."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a request, unless it ignores them."""
    max_num_batched_tokens: int = 512
    """Most device rows in a step."""
    max_num_seqs: int = 256
    """Most requests that hold device KV at a time; BE requests do not count against LS ones."""
    num_host_slots: int = 0
    """Most requests on the host tier; 0: there is none."""
    max_piggyback_seats: int = 32
    """P: most piggyback rows of a layer, and most rows of a second sub-batch."""
    ls_reserve_blocks: int = 0
    """Device blocks that BE requests leave free."""
    checkpoint_blocks: int = 0
    """Most blocks of BE requests to checkpoint a step; 0: none."""

    @classmethod
    def of(
        cls, config: EngineConfig, options: PolicyOptions, spec: ModelSpec, *, max_model_len: int,
        num_device_blocks: int, has_host_tier: bool, has_checkpoints: bool,
    ) -> Self:  # fmt: skip
        """Take them from an engine's settings and its model.

        Args:
            config: The settings.
            options: The policy's.
            spec: The model's sizes.
            max_model_len: Longest prompt plus output, in tokens.
            num_device_blocks: Blocks of the device pool.
            has_host_tier: There is a host tier.
            has_checkpoints: BE blocks are copied to it as they fill.
        """
        return cls(
            num_layers=spec.num_layers,
            block_size=config.block_size,
            max_model_len=max_model_len,
            classes=config.classes,
            eos_token_ids=spec.eos_token_ids,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            num_host_slots=config.max_host_requests if has_host_tier else 0,
            max_piggyback_seats=config.max_piggyback_seats,
            ls_reserve_blocks=int(options.ls_reserve_fraction * num_device_blocks),
            checkpoint_blocks=max(1, -(-config.max_num_batched_tokens // config.block_size)) if has_checkpoints else 0,
        )
