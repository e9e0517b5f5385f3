"""Settings of engines for tests that give all policies the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniserve.core.config import EngineConfig
from omniserve.sched.policy import known_options


def flat_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Return a config of these settings; options of policies stand among them, and a policy gets those that it has."""
    fields = EngineConfig.__dataclass_fields__
    options = {name: value for name, value in settings.items() if name not in fields}
    own = {name: value for name, value in settings.items() if name in fields}
    if options:
        own["scheduler_options"] = known_options(own.get("scheduler", EngineConfig.scheduler), options)
    return EngineConfig(**own)
