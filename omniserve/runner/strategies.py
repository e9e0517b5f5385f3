"""make_strategies: the one place that knows which strategies of the layer loop there are.

A strategy is a module of its own: it says which steps need it, and what these do beside passing their rows through the
layers (``StepHooks``). It is imported if the settings can ask for such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial

from omniserve.core.setup import RunnerSetup
from omniserve.host.arrived_results import StageEvents
from omniserve.host.tier import HostTier
from omniserve.runner.layer_loop import HeldEvents, LayerLoop, StepStrategy
from omniserve.runner.rank_broadcast import RankBroadcast


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyContext:
    """What strategies work with."""

    loop: LayerLoop
    tier: HostTier | None
    held: HeldEvents
    broadcast: RankBroadcast
    stage_events: StageEvents | None
    """What the host tier of this rank has told, in a stage; None: there are no stages."""


MakeStrategies = Callable[[RunnerSetup, StrategyContext], tuple[StepStrategy, ...]]


def make_strategies(
    setup: RunnerSetup, context: StrategyContext, *, safepoint: Callable[[], Set[str]] = frozenset
) -> tuple[StepStrategy, ...]:
    """Return the strategies that an engine's steps may need, in the order in which their hooks are called.

    ``safepoint`` is asked between two layers which requests' rows must leave the step, on rank 0, if the setup has
    safepoints.
    """
    loop, tier, broadcast = context.loop, context.tier, context.broadcast
    strategies: list[StepStrategy] = []
    if tier is not None and context.stage_events is not None:
        from omniserve.runner.late_in_stages import StagedLateJoins, StageResults
        from omniserve.runner.staged_loop import StagedLoop

        assert isinstance(loop, StagedLoop)
        strategies.append(StagedLateJoins(loop, StageResults(context.stage_events, context.held)))
    elif tier is not None:
        from omniserve.runner.late_results import LateJoins, LateResults

        strategies.append(LateJoins(loop, LateResults(tier, context.held, broadcast)))
    if setup.has_safepoints:
        from omniserve.runner.safepoint import LayerPreemption

        must_leave = partial(broadcast.agree, safepoint)
        strategies.append(
            LayerPreemption(loop, keep=setup.keeps_halted, every=setup.safepoint_every, must_leave=must_leave)
        )
    if setup.awaits_host and tier is not None:
        from omniserve.runner.pipelining import Pipelining

        strategies.append(Pipelining(loop, tier=tier, keep=context.held.hold, broadcast=broadcast))
    return tuple(strategies)
