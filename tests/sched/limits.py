"""Limits of a scheduler without an engine."""

from __future__ import annotations

from typing import Any

from omniserve.core.config import EngineConfig
from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.sched import SchedulerLimits
from omniserve.sched.policy import known_options

BLOCK = 4
WITHOUT_OBJECTIVES = tuple(ClassSpec(name=kind, kind=kind) for kind in (ServiceClass.LS, ServiceClass.BE))


def make_limits(scheduler: str = "omniserve", **settings: Any) -> SchedulerLimits:
    """Return the limits of a small model, without a host tier unless told otherwise.

    Args:
        scheduler: The policy, for ``policy_of(limits.config)``.
        settings: Fields of SchedulerLimits, of EngineConfig and options of policies; those of other ones are left out.
    """
    own = {"num_layers": 2, "max_model_len": 1000}
    own |= {name: settings.pop(name) for name in settings.keys() & SchedulerLimits.__dataclass_fields__.keys()}
    config = {"block_size": BLOCK, "classes": WITHOUT_OBJECTIVES}
    config |= {name: settings.pop(name) for name in settings.keys() & EngineConfig.__dataclass_fields__.keys()}
    options = known_options(scheduler, settings)
    return SchedulerLimits(config=EngineConfig(scheduler=scheduler, scheduler_options=options, **config), **own)
