"""The scheduler and its policies. None of them reads a clock or touches a tensor."""

from omniserve.sched.batch import Batch
from omniserve.sched.options import PolicyOptions, SchedulerLimits
from omniserve.sched.policy import SCHEDULERS, Policy, policy_of
from omniserve.sched.scheduler import Scheduler
from omniserve.sched.step_cost import Forecast

__all__ = ["SCHEDULERS", "Batch", "Forecast", "Policy", "PolicyOptions", "Scheduler", "SchedulerLimits", "policy_of"]

_POLICIES = {
    "apex": "apex:APEXPolicy",
    "bros": "bros:BROSPolicy",
    "bros-paper": "bros:BROSPaperPolicy",
    "conserve": "conserve:ConServePolicy",
    "conserve-paper": "conserve:ConServePaperPolicy",
    "fcfs": "baselines:FCFSPolicy",
    "llumnix": "baselines:LlumnixPolicy",
    "neo": "neo:NEOPolicy",
    "neo-paper": "neo_paper:NEOPaperPolicy",
    "non-preemptive": "baselines:NonPreemptivePolicy",
    "omniserve": "omniserve:OmniServePolicy",
    "omniserve-paper": "omniserve_paper:OmniServePaperPolicy",
    "online-only": "baselines:OnlineOnlyPolicy",
    "priority": "baselines:PriorityPolicy",
    "round-robin": "baselines:RoundRobinPolicy",
    "sarathi": "baselines:SarathiPolicy",
}
"""The built-in policies; a policy's module is imported when it is asked for."""

for _name, _path in _POLICIES.items():
    SCHEDULERS.register_at(_name, f"omniserve.sched.{_path}")
