"""Schedulers: one file per policy. None of them reads a clock or touches a tensor."""

from omniserve.sched.apex import APEXScheduler
from omniserve.sched.base import SCHEDULERS, Scheduler, SchedulerLimits
from omniserve.sched.bros import BROSScheduler
from omniserve.sched.conserve import ConServeScheduler
from omniserve.sched.fcfs import FCFSScheduler
from omniserve.sched.llumnix import LlumnixScheduler
from omniserve.sched.load import Forecast
from omniserve.sched.neo import NEOScheduler
from omniserve.sched.non_preemptive import NonPreemptiveScheduler
from omniserve.sched.omniserve import OmniServeScheduler
from omniserve.sched.online_only import OnlineOnlyScheduler
from omniserve.sched.priority import PriorityScheduler
from omniserve.sched.round_robin import RoundRobinScheduler
from omniserve.sched.sarathi import SarathiScheduler

__all__ = [
    "SCHEDULERS",
    "APEXScheduler",
    "BROSScheduler",
    "ConServeScheduler",
    "FCFSScheduler",
    "Forecast",
    "LlumnixScheduler",
    "NEOScheduler",
    "NonPreemptiveScheduler",
    "OmniServeScheduler",
    "OnlineOnlyScheduler",
    "PriorityScheduler",
    "RoundRobinScheduler",
    "SarathiScheduler",
    "Scheduler",
    "SchedulerLimits",
]
