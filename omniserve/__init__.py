"""OmniServe serves latency-sensitive and best-effort requests with one Hugging Face model on one machine.

Importing starts nothing: no thread, no process, no CUDA context. What needs torch is imported at its first use, so that
a process that only speaks HTTP stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omniserve.core.config import (
    DiskKVConfig,
    EngineConfig,
    ExecutionConfig,
    HostsConfig,
    ParallelConfig,
    PrefillConfig,
)
from omniserve.core.errors import EngineStopped, OmniServeError, RequestRejected, Stalled, UnsupportedModelError
from omniserve.core.request import (
    SLO,
    ClassSpec,
    Completion,
    FinishReason,
    Pooling,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    ServiceClass,
    TokenLogprob,
)
from omniserve.core.stats import EngineStats
from omniserve.core.version import __version__ as __version__
from omniserve.sampling.grammar import json_grammar

if TYPE_CHECKING:
    from omniserve.engine.engine import Engine
    from omniserve.layers.patching import patch, unpatch

__all__ = [
    "SLO",
    "ClassSpec",
    "Completion",
    "DiskKVConfig",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "EngineStopped",
    "ExecutionConfig",
    "FinishReason",
    "HostsConfig",
    "OmniServeError",
    "ParallelConfig",
    "Pooling",
    "PrefillConfig",
    "Request",
    "RequestOutput",
    "RequestRejected",
    "RequestTimes",
    "SamplingParams",
    "ServiceClass",
    "Stalled",
    "TokenLogprob",
    "UnsupportedModelError",
    "json_grammar",
    "patch",
    "unpatch",
]

# No name here may be that of a submodule: importing the submodule would take its place.
_NEED_TORCH = {
    "Engine": "omniserve.engine.engine",
    "patch": "omniserve.layers.patching",
    "unpatch": "omniserve.layers.patching",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NEED_TORCH[name]), name)
