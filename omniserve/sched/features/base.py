"""StepFeature: the hooks of a feature; what its hooks are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omniserve.core.plan import DeviceChunk, PiggybackEntry, PiggybackJoin, StepOutput, StepPlan
from omniserve.core.request import Request, RequestOutput
from omniserve.core.work import SideWork
from omniserve.kv.base import KVManager
from omniserve.sched.host_rows import HostRows
from omniserve.sched.options import PolicyOptions, SchedulerLimits
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import Phase, RequestState
from omniserve.sched.step_cost import StepCost

if TYPE_CHECKING:
    from omniserve.sched.features.drafter import Drafter

Row = DeviceChunk | PiggybackEntry | PiggybackJoin
"""The row of a request in a step, or its rows, that its tokens come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSettings:
    """What features are told as they are made, beside ``SchedulerLimits``."""

    drafter_of: Callable[[str, Request], Drafter] | None = None
    """Makes the drafter of a request, by its id, that is decoded speculatively; None: prompt lookup."""
    options: PolicyOptions = field(default_factory=PolicyOptions)
    """The options of the policy."""


PLAIN_SETTINGS = FeatureSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureContext:
    """What a feature works with."""

    kv: KVManager
    limits: SchedulerLimits
    side_work: SideWorkQueue
    settings: FeatureSettings
    counters: Counter[str]
    """Fields of ``SchedulerStats`` that are not by class."""


@dataclass(kw_only=True, slots=True)
class OpenStep:
    """A step that a policy has put together, to which features may add what it has room for."""

    chunks: dict[str, DeviceChunk]
    """The device rows, by request."""
    host_rows: HostRows
    states: Mapping[str, RequestState]
    cost: StepCost | None
    """The step's predicted cost; None: there is no latency model."""
    bound_s: float
    """Most seconds of the step."""
    tokens_left: int
    """What is left of the step's budget of tokens."""
    reserve_host_blocks: int
    """Host blocks to leave free for the newest tokens of requests there."""


class StepFeature:
    """A feature whose hooks are called for all requests and steps; here they do nothing."""

    def __init__(self, context: FeatureContext) -> None:
        pass

    # -- a request -----------------------------------------------------------------------------------------------

    def on_arrival(self, state: RequestState) -> None:
        """Take note of a new request."""

    def on_phase(self, state: RequestState, phase: Phase) -> None:
        """Take note that a request moves or is restored, returns to the queue, or ends.

        ``phase`` is MOVING, DEVICE (it has come there by a move), WAITING, ENDING or FINISHED. Admission is no such
        change: ``chunk_fields`` sees a WAITING request then.
        """

    # -- planning ------------------------------------------------------------------------------------------------

    def chunk_size(self, state: RequestState, tokens_left: int, cost: StepCost | None, bound_s: float) -> int | None:
        """Return how many tokens the request's next chunk must have; None: the feature does not say."""
        return None

    def chunk_fields(self, state: RequestState) -> Mapping[str, Any]:
        """Return fields of the request's ``DeviceChunk`` that is planned."""
        return {}

    def complete(self, step: OpenStep) -> None:
        """Add rows to a step that is complete otherwise."""

    def take_work(self) -> tuple[SideWork, ...]:
        """Return, once, the side work that the plan which is decided starts before all other."""
        return ()

    def is_certain(self, plan: StepPlan) -> bool:
        """Tell whether all that is booked of a plan, as far as the feature goes, is known before the plan has run."""
        return True

    def awaits_tokens(self, states: Iterable[RequestState]) -> bool:
        """Tell whether the next plan is worth waiting for the tokens of the step in flight."""
        return False

    # -- booking -------------------------------------------------------------------------------------------------

    def takes_outcome(self, state: RequestState, row: Row, output: StepOutput) -> bool:
        """Book a row that did not simply compute all of its tokens, and return True; False: the scheduler books it."""
        return False

    def on_computed(
        self, state: RequestState, row: Row, output: StepOutput, expect_token: Callable[[RequestState], None]
    ) -> None:
        """Book more of a row that was computed; ``expect_token`` books a further new token of the request."""

    def on_output(self, state: RequestState, row: Row, output: RequestOutput, num_sampled: int) -> RequestOutput:
        """Return a request's output with what the feature adds to it.

        Args:
            row: The row or rows that the output comes from.
            output: Its new tokens may be fewer than were sampled.
            num_sampled: Number of tokens that were sampled.
        """
        return output

    def discount(self, output: RequestOutput, left: RequestOutput) -> None:
        """Do not count tokens of an output that a stop string has cut off: only ``left`` is of use."""

    def stats(self) -> Mapping[str, int]:
        """Return fields of ``SchedulerStats``."""
        return {}

    def check(self, states: list[RequestState]) -> None:
        """Verify the feature's invariants, given all unfinished requests.

        Raises:
            AssertionError: With what does not fit.
        """
