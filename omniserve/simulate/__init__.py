"""The engine's scheduler and KV manager on a virtual clock: what a load would see on a machine that need not be here.

    from omniserve.simulate import Load, SimulationConfig, simulate

No torch is loaded. ``python -m omniserve.simulate`` is the command line.
"""

from omniserve.simulate.calibration import Calibration
from omniserve.simulate.host_tier import Copies, HostNode, SimulatedHostTier
from omniserve.simulate.load import Load, TraceRequest
from omniserve.simulate.machine import Machine, PrefillNode, machine_of_profile
from omniserve.simulate.results import ClassResult, RequestResult, Result
from omniserve.simulate.run import SimulationConfig, simulate
from omniserve.simulate.runner import StepRecord

__all__ = [
    "Calibration",
    "ClassResult",
    "Copies",
    "HostNode",
    "Load",
    "Machine",
    "PrefillNode",
    "RequestResult",
    "Result",
    "SimulatedHostTier",
    "SimulationConfig",
    "StepRecord",
    "TraceRequest",
    "machine_of_profile",
    "simulate",
]
