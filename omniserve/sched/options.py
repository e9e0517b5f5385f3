"""Settings that policies are given: their options (``EngineConfig.scheduler_options``), and the limits of the engine.

Each policy names the group that it reads (``Policy.options_type``). Policies that read the same options share a group.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, Self

from omniserve.core.config import EngineConfig
from omniserve.core.request import Request, ServiceClass
from omniserve.core.spec import ModelSpec
from omniserve.kv.base import KVManager


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Options of every policy."""

    ls_reserve_fraction: float = 0.05
    """Share of the device blocks that BE requests leave free for LS ones, in [0, 1)."""
    checkpoint_kv: bool = False
    """Copy full blocks of BE requests to the host tier as they fill, so that moving a request there costs one block.
    The KV manager ``incremental`` always does; ``bidirectional`` never: it copies what is about to be overwritten."""
    latency_model: str = "omniserve"
    """The predictor of steps if the engine has a profile: a name in LATENCY_MODELS, or ``package.module:Class``."""
    correct_model: bool = True
    """Predictions follow what steps really take (``CorrectedModel``); False: they stay what the profile says."""

    @property
    def preempts(self) -> bool:
        """Plans may have preemptible rows. Only if so, the engine asks between layers which rows must leave."""
        return False

    @property
    def preemptible_kind(self) -> ServiceClass | None:
        """Kind of requests all of whose rows are preemptible; None: the policy marks rows itself, if any."""
        return None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} must be a number >= 0, got {value}")
        if self.ls_reserve_fraction >= 1:
            raise ValueError(f"ls_reserve_fraction must be in [0, 1), got {self.ls_reserve_fraction}")


@dataclass(frozen=True, kw_only=True)
class HostTierOptions(PolicyOptions):
    """Options of policies that run BE decodes on the host tier."""

    max_piggyback_rows: int | None = None
    """Most piggyback rows in a step over all layers; None: ``max_piggyback_seats`` in every layer."""
    swap_in_delay_s: float = 1.0
    """Seconds that load must have been light before BE KV moves back to the device. Paper: omniserve 3.2.4."""
    min_residence_s: float = 5.0
    """Seconds that a BE request's KV stays where it is after a move, unless an LS request needs the memory."""
    late_joins: bool = True
    """A step looks for host results as it reaches their layer; False: only before it begins."""

    def most_rows(self, limits: SchedulerLimits) -> int:
        """Return the most piggyback rows of a step, over all layers."""
        every_layer = limits.config.max_piggyback_seats * (limits.num_layers + 1)
        return self.max_piggyback_rows if self.max_piggyback_rows is not None else every_layer

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_piggyback_rows is not None and self.max_piggyback_rows < 1:
            raise ValueError(f"max_piggyback_rows must be >= 1 or None, got {self.max_piggyback_rows}")


@dataclass(frozen=True, kw_only=True)
class LlumnixOptions(HostTierOptions):
    """Options of ``llumnix``."""

    headroom_fraction: float = 0.0
    """Share of the device blocks that only LS requests may hold, in [0, 1); 0: BE requests may hold all but the
    ``ls_reserve_fraction`` that they leave free. Paper: omniserve 2.3 keeps 0.8 (Fig. 2a)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.headroom_fraction >= 1:
            raise ValueError(f"headroom_fraction must be in [0, 1), got {self.headroom_fraction}")


@dataclass(frozen=True, kw_only=True)
class CoServingOptions(HostTierOptions):
    """Options of policies that fill steps with BE work up to the tightest objective."""

    admission: bool = True
    """Reject LS requests that are predicted to miss their TTFT."""
    be_order: Literal["decode", "prefill"] = "decode"
    """``decode``: BE decodes come before BE prompts, which get the time that is left. ``prefill``: the paper's order
    (omniserve 3.3.2); more BE prompts than the device can prefill then leave no time to decode."""
    be_prefix_order: bool = True
    """Admit BE prompts that begin alike one after another, with the prefix cache; none waits for more than 64 others.
    False: by arrival."""
    be_max_wait_s: float | None = None
    """Seconds after which a BE request that has got no token comes before all other BE work, and takes places and
    memory of BE requests that have not waited as long. It waits for LS work then, and for others that are as late.
    None: there is no such bound."""
    offload_for_time: bool = False
    """BE decodes for which steps have no time go to the host tier although the device has memory for them, if the host
    tier has cores of its own (omniserve 3.3.5). There each token takes a step a layer, so that it comes later."""
    slack: Literal["step", "deadline"] = "deadline"
    """``step``: no step is longer than the shortest TPOT in it. ``deadline``: a request that is ahead of its schedule
    lends its lead to the step."""
    headrooms: bool = True
    """Work leaves a share of each TPOT and TTFT for what no latency model knows (``Headrooms``); False: it may take all
    of them, as in the paper (omniserve 3.3.4)."""
    newcomer_bound: bool = True
    """BE work lengthens no step beyond what an LS request could bear that came as the step begins; False: only requests
    that are there bound it, as in the paper."""
    defer_classes: bool = False
    """Rows of a lower class leave a step between two layers for a request of a higher class that is predicted to miss
    its TTFT otherwise, and go on there in a later step, as far as their own objective has slack for that (omniserve 6,
    multiple priority levels). Best-effort rows are of the lowest class. A step that rows may leave is not launched
    ahead of another one; as CUDA graphs it runs in parts, from one attention to the next. These rows carry no drafts.
    It needs a latency model."""
    defer_tokens: Literal["off", "late", "always"] = "off"
    """Rows of lower classes pass only some layers of a step, and the next layers in later steps, as far as their own
    TPOT has slack for that (omniserve 6, multiple priority levels). ``late``: decodes of lower LS classes, the lowest
    first, in steps that would make a token of a higher class late. ``always``: all of these beside decodes of a higher
    class, so that the time between its tokens is shorter, and best-effort rows beside decodes of any LS class with a
    TPOT. The price is as for ``defer_classes``; it needs a latency model."""
    most_token_steps: int = 8
    """With ``defer_tokens``: most steps over which the layers of a token, or of a best-effort chunk, are spread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.defer_tokens not in ("off", "late", "always"):
            raise ValueError(f"defer_tokens must be off, late or always, got {self.defer_tokens!r}")
        if self.be_max_wait_s is not None and self.be_max_wait_s <= 0:
            raise ValueError(f"be_max_wait_s must be > 0 or None, got {self.be_max_wait_s}")
        if self.most_token_steps < 1:
            raise ValueError(f"most_token_steps must be >= 1, got {self.most_token_steps}")

    @property
    def leaves_steps(self) -> bool:
        """Rows leave steps between two layers."""
        return self.defer_classes or self.defer_tokens != "off"

    @property
    def preempts(self) -> bool:
        return self.leaves_steps


@dataclass(frozen=True, kw_only=True)
class OmniServeOptions(CoServingOptions):
    """Options of ``omniserve``."""

    seat_objective: bool = True
    """As many piggyback seats as bring most BE work a second; False: as many as the fullest layer has rows, as in the
    paper (omniserve 3.3.6)."""


@dataclass(frozen=True, kw_only=True)
class PipeliningOptions(CoServingOptions):
    """Options of policies with a second sub-batch, which the device waits for: ``neo``, ``apex``."""

    partial_progress_first: bool = True
    """Host requests that are furthest through the layers run first in the second sub-batch (apex 3.4); False: the
    oldest do."""


@dataclass(frozen=True, kw_only=True)
class APEXOptions(PipeliningOptions):
    """Options of ``apex``."""

    watch_host: bool = True
    """N_C follows what the host tier really attends for (apex 6); False: it stays what the profile says."""

    strategy: Literal["auto", "pipelined", "overlapped"] = "auto"
    """How requests on the host tier decode. ``auto``: as inequality (5) says, in each step. ``pipelined``: always in a
    second sub-batch that the device waits for, of as many requests as the host attends for in time, but at least one;
    none if the step's bound has no time for one. ``overlapped``: always as a cohort, one layer a step; device work
    leaves it the time that a second sub-batch would take, as with ``auto``."""
    min_host_per_device: int = 8
    """The least number of host requests, for each request of the step on the device, with which a cohort begins; as
    many as there are seats always do. 0: any number does. Paper: apex 4.2."""
    max_cohort_wait_s: float = 1.0
    """Seconds that a smaller cohort waits for more requests before it begins."""
    hybrid_first_batch: bool = False
    """Some of the pipelined host rows are in the first sub-batch, with the device rows, as in the paper (apex figure
    2): the host gets its share of them for the time in which the device attends and runs the second sub-batch. False:
    all are in the second. Not with ``defer_classes`` or ``defer_tokens``: the device rows of such a step do not leave
    it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_host_per_device < 0:
            raise ValueError(f"min_host_per_device must be >= 0, got {self.min_host_per_device}")
        if self.hybrid_first_batch and self.leaves_steps:
            name = "defer_classes" if self.defer_classes else "defer_tokens"
            raise ValueError(f"hybrid_first_batch and {name} exclude each other: switch one of them off")


@dataclass(frozen=True, kw_only=True)
class LayerPreemptionOptions(PolicyOptions):
    """Options of policies with BE rows that may leave a step between two layers. Paper: conserve 4.3."""

    keep_halted: bool = True
    """Rows that left a step go on later from the layer where they left; False: they begin anew, as in the paper."""
    safepoint_every: int = 1
    """Number of layers from one safepoint to the next. Paper: conserve 6.5 has 4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.safepoint_every < 1:
            raise ValueError(f"safepoint_every must be >= 1, got {self.safepoint_every}")

    @property
    def preempts(self) -> bool:
        return True

    @property
    def preemptible_kind(self) -> ServiceClass | None:
        return ServiceClass.BE


@dataclass(frozen=True, kw_only=True)
class ConServeOptions(LayerPreemptionOptions):
    """Options of ``conserve``."""

    layer_preemption: bool = True
    """BE rows leave a step between two layers for an LS request that would be late (4.3); False: it waits for the end
    of the step."""
    best_step_size: bool = True
    """A step without LS requests has the size that brings most tokens a second (4.2); False: all that the token budget
    admits."""

    @property
    def preempts(self) -> bool:
        return self.layer_preemption


@dataclass(frozen=True, kw_only=True)
class ConServePaperOptions(ConServeOptions):
    """Options of ``conserve-paper``: those of ``conserve`` with the paper's choices (4.3, 6.5)."""

    keep_halted: bool = False
    """Work of rows that left a step is lost (4.3)."""
    safepoint_every: int = 4
    """Layers from one safepoint to the next (6.5)."""
    latency_model: str = "conserve"
    """The paper's polynomial (4.2)."""


@dataclass(frozen=True, kw_only=True)
class BROSOptions(PolicyOptions):
    """Options of ``bros``."""

    batch_limits_ls: bool = False
    """A step has at most B_curr requests, LS ones included, as in the paper (bros equation 7). False: B_curr limits the
    BE requests that join a step."""
    replace_ls: bool = True
    """BE requests take the place of the least urgent LS ones that can wait a step longer (the second half of Algorithm
    1); False: they only join them."""
    adapt_batch: bool = True
    """B_curr doubles while time keeps no LS request out, and falls back when it does (4.2); False: it is the largest
    batch, ``max_num_seqs``."""
    swap_term: bool = False
    """What a step takes is predicted as max(t_exec, t_swap), with the KV that its requests have on the host only (bros
    4.1), if the latency model knows t_swap (``bros`` does)."""


@dataclass(frozen=True, kw_only=True)
class BROSPaperOptions(BROSOptions):
    """Options of ``bros-paper``: those of ``bros`` with the paper's choices."""

    batch_limits_ls: bool = True
    """B_curr limits LS requests, too (equation 7; lines 6 and 22 of Algorithm 1)."""
    swap_term: bool = True
    """C is max(t_exec, t_swap) (4.1)."""
    latency_model: str = "bros"
    """The paper's models of prefill and decode (4.1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """An engine's settings, and the numbers that follow from them, from its model and from its pools."""

    config: EngineConfig
    num_layers: int
    """L, the model's layers that attend."""
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
    num_state_slots: int = 0
    """Most requests with recurrent states; 0: the model has none."""
    late_layers: int = 0
    """Number of layers, from the first one on, in which a step looks for host results as it reaches them, not only
    before it begins."""
    max_host_drafts: int = 0
    """Most drafts that a token takes with it through the host tier."""
    kv_block_bytes: int = 0
    """Bytes of a KV block over the layers of a stage, which are all without stages; 0: not known."""

    def blocks_per_step(self, block_size: int) -> int:
        """Return how many blocks the tokens of the largest step fill."""
        return -(-self.config.max_num_batched_tokens // block_size)

    @property
    def can_resume(self) -> bool:
        """A preempted request can go on behind a part of its tokens, if the KV of these is kept.

        Recurrent states stand where the last token left them.
        """
        return not self.num_state_slots

    def is_speculative(self, request: Request) -> bool:
        """Tell whether a request is decoded with drafts.

        Not with recurrent states, nor with several stages: neither can go back to the last right draft.
        """
        is_wanted = request.speculation
        if is_wanted is None:
            spec = self.config.class_named(request.service_class)
            is_wanted = spec.speculation or bool(request.predicted_token_ids)
        return is_wanted and not self.num_state_slots and self.config.parallel.pipeline_parallel_size == 1

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        options: PolicyOptions,
        spec: ModelSpec,
        kv: KVManager,
        *,
        max_model_len: int,
        late_layers: int,
        max_host_drafts: int = 0,
    ) -> Self:
        """Return the limits of an engine; ``options`` are its policy's, the others say what its device can."""
        has_checkpoints = options.checkpoint_kv or kv.evictions is not None
        return cls(
            config=config,
            num_layers=spec.num_layers,
            max_model_len=max_model_len,
            eos_token_ids=spec.eos_token_ids,
            num_host_slots=config.max_host_requests if kv.num_host_blocks else 0,
            ls_reserve_blocks=int(options.ls_reserve_fraction * kv.num_device_blocks),
            checkpoint_blocks=-(-config.max_num_batched_tokens // config.block_size) if has_checkpoints else 0,
            num_state_slots=num_state_slots(config, spec, has_host_tier=kv.num_host_blocks > 0),
            late_layers=late_layers if isinstance(options, HostTierOptions) and options.late_joins else 0,
            max_host_drafts=max_host_drafts,
            kv_block_bytes=-(
                -spec.kv_block_bytes(config.block_size, config.execution.kv_dtype)
                // config.parallel.pipeline_parallel_size
            ),
        )


def num_state_slots(config: EngineConfig, spec: ModelSpec, *, has_host_tier: bool) -> int:
    """Return the most requests that can have computed tokens at a time; 0 if the model keeps no states of them.

    That is as many on the device for each kind as for all (see ``MemoryRules.is_full``), and those of the host tier.
    """
    if not spec.state_bytes:
        return 0
    return 2 * config.max_num_seqs + (config.max_host_requests if has_host_tier else 0)
