"""StepLog: what is kept of the steps that ran: counters, the trace, and what the latency model learns from."""

from __future__ import annotations

import dataclasses

from omniserve.core.plan import is_whole, without_missed
from omniserve.engine.stepping import FinishedStep
from omniserve.latency import CorrectedModel, ModelShape, features_of
from omniserve.latency.trace import StepTracer


class StepLog:
    """Counts steps, traces them (the tracer is closed with the log), and tells the latency model of every whole one."""

    def __init__(self, shape: ModelShape, *, latency: CorrectedModel | None, tracer: StepTracer | None) -> None:
        self._shape = shape
        self._latency = latency
        self._tracer = tracer
        self.num_steps = 0
        self.seconds = 0.0
        self.num_device_tokens = 0
        self.num_piggyback_rows = 0

    def record(self, step: FinishedStep) -> None:
        """Take a step that computed something."""
        self.num_steps += 1
        self.seconds += step.seconds
        self.num_device_tokens += step.plan.num_device_tokens
        plan = without_missed(step.plan, step.result.missed)  # what was computed
        self.num_piggyback_rows += sum(join.num_rows for join in plan.joins)
        if self._tracer is None and self._latency is None:
            return
        features = features_of(plan, self._shape, host_works=step.host_works)
        if self._tracer is not None:
            terms: dict[str, float] = {}
            if self._latency is not None:
                terms = dict(zip(self._latency.term_names, self._latency.terms(features), strict=True))
            self._tracer.record(
                plan,
                started_s=step.started_s,
                seconds=step.seconds,
                features=dataclasses.asdict(features),
                terms=terms,
                halted=step.result.halted,
                outputs=step.outputs,
                slos={name: entry.slo for name, entry in step.requests.items()},
                classes={name: entry.service_class for name, entry in step.requests.items()},
            )
        if self._latency is not None and step.ran_alone and is_whole(step.plan, step.result.halted):
            self._latency.observe(features, step.seconds, step.started_s + step.seconds)

    def close(self) -> None:
        """End the trace. A second call does nothing."""
        if self._tracer is not None:
            self._tracer.close()
