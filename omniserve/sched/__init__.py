"""Schedulers: one file per policy. None of them reads a clock or touches a tensor."""

from omniserve.sched.apex import APEXScheduler
from omniserve.sched.base import SCHEDULERS, Scheduler, SchedulerLimits
from omniserve.sched.fcfs import FCFSScheduler
from omniserve.sched.load import Forecast
from omniserve.sched.neo import NEOScheduler
from omniserve.sched.omniserve import OmniServeScheduler
from omniserve.sched.sarathi import SarathiScheduler

__all__ = [
    "SCHEDULERS",
    "APEXScheduler",
    "FCFSScheduler",
    "Forecast",
    "NEOScheduler",
    "OmniServeScheduler",
    "SarathiScheduler",
    "Scheduler",
    "SchedulerLimits",
]
