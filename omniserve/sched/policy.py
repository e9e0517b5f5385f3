"""Policy: decides what each step computes. Subclass it and write ``schedule``.

Policies see no clock and no tensor. Time comes in as an argument; tests drive the same objects with a device made of
dictionaries (``tests/sched/fake_device.py``), and the simulator drives ``Stepper`` with a runner of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from omniserve.core.config import EngineConfig
from omniserve.core.options import Value, make_options
from omniserve.core.plan import StepPlan
from omniserve.core.registry import Registry
from omniserve.core.request import SLO, Request
from omniserve.core.work import HostEvent
from omniserve.sched.batch import NewBatch
from omniserve.sched.options import PolicyOptions
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import Forecast
from omniserve.sched.view import RequestView


class Policy:
    """Puts together a step from the requests that it is given. It reads no clock and touches no tensor.

    It sees the requests in a ``view`` that can only be read, and changes where they are through the batch of a step,
    which ``new_batch`` makes. A policy that keeps requests itself from step to step leaves out the view's ``hidden``
    ones, and lets none give way that is ``pinned``.

    All but ``schedule`` are hooks, for policies that learn from what happens. Without a latency model there is no
    ``forecast`` of what a step will take.
    """

    predicts: ClassVar[bool] = False
    """The policy makes use of a latency model if there is one."""
    options_type: ClassVar[type[PolicyOptions]] = PolicyOptions
    """The class of the policy's options."""
    offloads: ClassVar[bool] = False
    """The policy moves requests to the host tier."""
    offloads_ls: ClassVar[bool] = False
    """LS requests may decode on the host tier, too. False: only BE requests move there, and no LS row leaves the
    device."""
    awaits_host: ClassVar[bool] = False
    """Steps wait for the host tier, with a second sub-batch (``StepPlan.pipelined``)."""
    busy_until_s: float = -math.inf
    """Predicted end of the step in flight, at which the next one can begin; the engine keeps it."""

    def __init__(
        self, view: RequestView, new_batch: NewBatch, options: PolicyOptions, forecast: Forecast | None = None
    ) -> None:
        self.view = view
        self.new_batch = new_batch
        self.options = options
        self.forecast = forecast
        self.limits, self.memory, self.host = view.limits, view.memory, view.host
        self.set_up()

    @classmethod
    def awaits_host_with(cls, options: PolicyOptions) -> bool:
        """Return ``awaits_host`` of a policy with these options, which may rule a second sub-batch out."""
        return cls.awaits_host

    def set_up(self) -> None:
        """Make what the policy keeps between steps."""

    def schedule(self, now_s: float) -> StepPlan:
        """Decide the next step: fill a ``Batch``, and close it with its ``plan``."""
        raise NotImplementedError

    def on_arrival(self, state: RequestState, now_s: float) -> float | None:
        """Take note of a request that has come, and waits.

        Returns:
            The predicted time to first token, seconds from arrival; None if the policy predicts none.

        Raises:
            RequestRejected: Its objectives cannot be met at present load.
        """
        return None

    def soonest_s(self, states: Sequence[RequestState], now_s: float) -> list[float] | None:
        """Return the TTFT that each of these LS requests of a class would have, in seconds; None: not predicted.

        Each is judged alone, behind all others that there are, with nothing of its prompt cached.
        """
        return None

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        """Take note of a request's first token, which ends its TTFT."""

    def on_end(self, state: RequestState) -> None:
        """Take note of the end of a request that had a token: by itself, at a stop string or as its client left."""

    def on_step_end(self, plan: StepPlan, now_s: float) -> None:
        """Take note of a step that has ended; its tokens are not booked yet."""

    def on_host_events(self, events: Sequence[HostEvent]) -> None:
        """Take note of host attention and KV moves that have finished, and are booked."""

    def admittable_per_s(self, now_s: float) -> dict[str, float]:
        """Return how many more requests a second would be admitted now, by LS class; without those not known."""
        return {}

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        """Return the preemptible requests whose rows must leave the running step for an LS request that has just come.

        Asked between the layers of a step, before the request is added, which came ``waited_s`` ago.
        Paper: conserve 4.3, Algorithm 1.
        """
        return frozenset()

    def begin_s(self, now_s: float) -> float:
        """Return when a step that is planned now begins: when the one in flight ends."""
        return max(now_s, self.busy_until_s)


def checked(policy: Policy, plan: StepPlan) -> StepPlan:
    """Return a policy's plan; it must have no rows that the policy has not announced."""
    awaits_host = policy.awaits_host_with(policy.options)
    assert awaits_host or not plan.pipelined, "the policy has a second sub-batch: set its awaits_host"
    return plan


def policy_of(config: EngineConfig) -> tuple[type[Policy], PolicyOptions]:
    """Return the policy that the settings name, and its options.

    Raises:
        ValueError: There is no such policy, it has no such option, or an option is out of range.
    """
    policy = SCHEDULERS.get(config.scheduler)
    return policy, make_options(policy.options_type, config.scheduler_options, owner=f"scheduler {config.scheduler!r}")


def known_options(scheduler: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return those of these options that a policy has, to give several policies the same ones.

    Raises:
        ValueError: There is no such policy, or neither it nor any built-in one has such an option.
    """
    own = {field.name for field in dataclasses.fields(SCHEDULERS.get(scheduler).options_type)}
    if values.keys() <= own:
        return dict(values)
    kinds = {SCHEDULERS.get(name).options_type for name in SCHEDULERS.names()}
    others = {field.name for kind in kinds for field in dataclasses.fields(kind)} - own
    if unknown := values.keys() - own - others:
        raise ValueError(f"no policy has the options {', '.join(sorted(unknown))}; there are {', '.join(own | others)}")
    return {name: value for name, value in values.items() if name in own}


SCHEDULERS: Registry[type[Policy]] = Registry("scheduler", package="omniserve.sched")
