"""The scheduler and its policies. None of them reads a clock or touches a tensor."""

from omniserve.sched import apex, baselines, bros, conserve, neo, omniserve, omniserve_paper
from omniserve.sched.batch import Batch
from omniserve.sched.options import PolicyOptions, SchedulerLimits
from omniserve.sched.policy import SCHEDULERS, Policy, policy_of
from omniserve.sched.scheduler import Scheduler
from omniserve.sched.step_cost import Forecast

__all__ = [
    "SCHEDULERS",
    "Batch",
    "Forecast",
    "Policy",
    "PolicyOptions",
    "Scheduler",
    "SchedulerLimits",
    "apex",
    "baselines",
    "bros",
    "conserve",
    "neo",
    "omniserve",
    "omniserve_paper",
    "policy_of",
]
