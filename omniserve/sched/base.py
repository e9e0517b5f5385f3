"""The contract of a scheduler."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from omniserve.core.config import EngineConfig
from omniserve.core.plan import HostEvent, StepOutput, StepPlan
from omniserve.core.registry import Registry
from omniserve.core.request import SLO, ClassSpec, Request, RequestOutput, ServiceClass
from omniserve.core.spec import ModelSpec
from omniserve.kv.base import KVManager
from omniserve.sched.load import Forecast


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
    max_step_tokens: int = 512
    """Most device rows in a step."""
    max_num_requests: int = 256
    """Most requests that hold device KV at a time; BE requests do not count against LS ones."""
    num_host_slots: int = 0
    """Most requests on the host tier; 0: there is none."""
    max_piggyback_slots: int = 32
    """P: most piggyback rows of a layer, and most rows of a second sub-batch."""
    max_piggyback_rows: int | None = None
    """Most piggyback rows of a step, over all layers; None: P in every layer."""
    ls_reserve_blocks: int = 0
    """Device blocks that BE requests leave free."""
    checkpoint_blocks: int = 0
    """Most blocks of BE requests to checkpoint a step; 0: none."""
    swap_in_delay_s: float = 1.0
    """Seconds that load must have been light before BE KV moves back to the device."""
    min_residence_s: float = 5.0
    """Seconds that BE KV stays where it is after a move, unless an LS request needs the memory."""
    admission: bool = True
    """Reject LS requests whose predicted TTFT misses their objective."""
    slack: str = "deadline"
    """``step`` or ``deadline``; see EngineConfig."""
    be_order: str = "decode"
    """``decode`` or ``prefill``: which BE work comes first."""
    offload_for_time: bool = False
    """BE decodes that the time bound keeps out go to the host tier, if it has cores of its own."""

    @classmethod
    def of(
        cls, config: EngineConfig, spec: ModelSpec, *, max_model_len: int, num_device_blocks: int, has_host_tier: bool,
        has_checkpoints: bool,
    ) -> Self:  # fmt: skip
        """Take them from an engine's settings and its model.

        Args:
            config: The settings.
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
            max_step_tokens=config.max_step_tokens,
            max_num_requests=config.max_num_requests,
            num_host_slots=config.max_host_requests if has_host_tier else 0,
            max_piggyback_slots=config.max_piggyback_slots,
            max_piggyback_rows=config.max_piggyback_rows,
            ls_reserve_blocks=int(config.ls_reserve_fraction * num_device_blocks),
            swap_in_delay_s=config.swap_in_delay_s,
            min_residence_s=config.min_residence_s,
            admission=config.admission,
            checkpoint_blocks=max(1, -(-config.max_step_tokens // config.block_size)) if has_checkpoints else 0,
            slack=config.slack,
            be_order=config.be_order,
            offload_for_time=config.offload_for_time,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Gauges and counters of a scheduler; see EngineStats."""

    waiting: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)
    device_blocks: Mapping[str, int] = field(default_factory=dict)
    """Gauge: device KV blocks that requests hold, by class."""
    host_blocks: Mapping[str, int] = field(default_factory=dict)
    host_requests: int = 0
    output_tokens: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    host_output_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    layer_preemptions: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    checkpoints: int = 0
    resumed_tokens: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)


class Scheduler(ABC):
    """Decides what each step computes. Called by one thread, in the order: notify, schedule, update.

    An engine whose device shall not wait between steps takes ``update`` apart: ``advance`` as it launches a step, then
    notify, schedule and launch of the next one, then ``settle`` of the first. At most one step is ahead of another, and
    only one whose plan ``is_certain`` is advanced before its outcome is known. Requests may end in between.

    Args:
        limits: Sizes and budgets.
        kv: The block ids; the scheduler is the only one that allocates and frees.
        forecast: What a step will take; None: there is no latency model.
    """

    predicts: ClassVar[bool] = False
    """It makes use of a latency model if there is one."""
    busy_until_s: float = -math.inf
    """When the step in flight ends, as predicted, and the next one can begin; the engine keeps it."""

    @abstractmethod
    def __init__(self, *, limits: SchedulerLimits, kv: KVManager, forecast: Forecast | None = None) -> None: ...

    @abstractmethod
    def add(
        self, request_id: str, request: Request, slo: SLO, now_s: float, *, arrival_s: float | None = None
    ) -> float | None:
        """Take a request.

        Args:
            arrival_s: When it came to the server, at most ``now_s``; None: now.

        Returns:
            The predicted time to first token, seconds from arrival; None if the policy predicts none.

        Raises:
            RequestRejected: Its objectives cannot be met at present load.
            ValueError: A request of that id has ended, but a copy or a host task still uses its KV.
        """

    @abstractmethod
    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        """End a request now; None if it is unknown or has finished. Its KV is freed as soon as nothing reads it."""

    @abstractmethod
    def notify(self, events: Sequence[HostEvent]) -> None:
        """Learn what finished beside the steps: host attention and KV moves."""

    @abstractmethod
    def schedule(self, now_s: float) -> StepPlan:
        """Decide the next step; allocates the KV it needs."""

    def update(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        """Book what a step computed: append tokens, finish requests, free KV."""
        self.advance(plan, output)
        return self.settle(plan, output, now_s)

    @abstractmethod
    def is_certain(self, plan: StepPlan) -> bool:
        """Return whether all that ``advance`` books of a plan is known before it has run."""

    @abstractmethod
    def advance(self, plan: StepPlan, output: StepOutput | None = None) -> None:
        """Book what is known of a step without its tokens: which KV there is, who is where, who gets a token.

        Each new token is PENDING_TOKEN until ``settle``. Who gets its last one is not scheduled any more.

        Args:
            plan: The step; to be called once for each plan, in their order.
            output: What came of it; None: nothing yet, and the plan is certain.
        """

    @abstractmethod
    def settle(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        """Fill in a step's tokens and end requests; to be called once for each advanced plan, in their order.

        What the step computed for requests that have ended since it was launched is dropped.
        """

    @abstractmethod
    def refresh(self, plan: StepPlan) -> StepPlan:
        """Return a plan that was made before the last ``settle``, without who ended and with the tokens that came.

        Only of a plan that is neither launched nor advanced.
        """

    def must_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> bool:
        """Return whether the running step's preemptible rows must leave for an LS request that has just come.

        Asked between the layers of a step, before ``add``; ``conserve`` 4.3, Algorithm 1.

        Args:
            request: It.
            slo: Its objectives.
            waited_s: How long ago it came.
            now_s: Now.
        """
        return False

    @property
    @abstractmethod
    def has_unfinished(self) -> bool:
        """True while a request is unfinished or a slot or move has not been given back."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Return gauges and counters."""


SCHEDULERS: Registry[type[Scheduler]] = Registry("scheduler", package="omniserve.sched")
