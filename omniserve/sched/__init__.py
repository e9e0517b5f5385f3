"""The scheduler, and one file per policy. None of them reads a clock or touches a tensor."""

from omniserve.sched.apex import APEXPolicy
from omniserve.sched.batch import Batch
from omniserve.sched.bros import BROSPolicy
from omniserve.sched.conserve import ConServePolicy
from omniserve.sched.fcfs import FCFSPolicy
from omniserve.sched.llumnix import LlumnixPolicy
from omniserve.sched.neo import NEOPolicy
from omniserve.sched.non_preemptive import NonPreemptivePolicy
from omniserve.sched.omniserve import OmniServePolicy
from omniserve.sched.online_only import OnlineOnlyPolicy
from omniserve.sched.options import PolicyOptions, SchedulerLimits
from omniserve.sched.policy import SCHEDULERS, Policy, policy_of
from omniserve.sched.priority import PriorityPolicy
from omniserve.sched.round_robin import RoundRobinPolicy
from omniserve.sched.sarathi import SarathiPolicy
from omniserve.sched.scheduler import Scheduler
from omniserve.sched.step_cost import Forecast

__all__ = [
    "SCHEDULERS",
    "APEXPolicy",
    "BROSPolicy",
    "Batch",
    "ConServePolicy",
    "FCFSPolicy",
    "Forecast",
    "LlumnixPolicy",
    "NEOPolicy",
    "NonPreemptivePolicy",
    "OmniServePolicy",
    "OnlineOnlyPolicy",
    "Policy",
    "PolicyOptions",
    "PriorityPolicy",
    "RoundRobinPolicy",
    "SarathiPolicy",
    "Scheduler",
    "SchedulerLimits",
    "policy_of",
]
