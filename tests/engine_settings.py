"""Settings of engines for tests that give all policies the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniserve.core.config import EngineConfig, ExecutionConfig
from omniserve.sched.policy import known_options


def flat_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Return a config of these settings.

    Those of ExecutionConfig stand among them, and options of policies, of which a policy gets those that it has.
    """
    own: dict[str, Any] = {}
    execution: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in settings.items():
        groups = ((own, EngineConfig), (execution, ExecutionConfig))
        group = next((group for group, kind in groups if name in kind.__dataclass_fields__), options)
        group[name] = value
    if execution:
        own["execution"] = ExecutionConfig(**execution)
    if options:
        own["scheduler_options"] = known_options(own.get("scheduler", EngineConfig.scheduler), options)
    return EngineConfig(**own)
