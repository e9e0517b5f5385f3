"""The engine's scheduler and KV manager on a virtual clock: what a load would see on a machine that need not be here.

    from omniserve.simulate import Load, SimulationConfig, simulate

No torch is loaded. ``python -m omniserve.simulate`` is the command line.
"""

from omniserve.simulate.calibration import Calibration
from omniserve.simulate.engine import SimulatedEngine
from omniserve.simulate.host_tier import Copies, HostNode, SimulatedHostTier
from omniserve.simulate.machine import Machine, machine_of_profile
from omniserve.simulate.results import ClassResult, RequestResult, Result
from omniserve.simulate.run import Load, SimulationConfig, simulate

__all__ = [
    "Calibration",
    "ClassResult",
    "Copies",
    "HostNode",
    "Load",
    "Machine",
    "RequestResult",
    "Result",
    "SimulatedEngine",
    "SimulatedHostTier",
    "SimulationConfig",
    "machine_of_profile",
    "simulate",
]
