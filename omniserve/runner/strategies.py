"""make_strategies: the one place that knows which strategies of the layer loop there are.

A strategy is a module of its own: it says which steps need it, and what these do beside passing their rows through the
layers (``StepHooks``). It is imported if the settings can ask for such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial

from omniserve.core.setup import RunnerSetup
from omniserve.host.tier import HostTier
from omniserve.runner.late_results import LateJoins, LateResults
from omniserve.runner.layer_loop import LayerLoop, StepStrategy
from omniserve.runner.rank_broadcast import RankBroadcast


def make_strategies(
    setup: RunnerSetup,
    loop: LayerLoop,
    *,
    tier: HostTier | None,
    late_results: LateResults,
    broadcast: RankBroadcast,
    safepoint: Callable[[], Set[str]],
) -> tuple[StepStrategy, ...]:
    """Return the strategies that an engine's steps may need, in the order in which their hooks are called.

    ``safepoint`` as in ``RunnerParts``, ``late_results`` takes the host events that come upon a step.
    """
    strategies: list[StepStrategy] = []
    if tier is not None:
        strategies.append(LateJoins(loop, late_results))
    if setup.has_safepoints:
        from omniserve.runner.safepoint import LayerPreemption

        must_leave = partial(broadcast.agree, safepoint)
        strategies.append(LayerPreemption(loop, keep=setup.keeps_halted, must_leave=must_leave))
    if setup.awaits_host and tier is not None:
        from omniserve.runner.pipelining import Pipelining

        strategies.append(Pipelining(loop, tier=tier, keep=late_results.keep, broadcast=broadcast))
    return tuple(strategies)
