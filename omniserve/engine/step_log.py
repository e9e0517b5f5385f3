"""StepLog: what is kept of the steps that ran: counters, the trace, what the latency model learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omniserve.core.plan import StepOutput, StepPlan, is_whole
from omniserve.core.request import SLO, RequestOutput
from omniserve.latency import CorrectedModel, ModelShape, features_of
from omniserve.latency.trace import StepTracer


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The facts about a request that is unfinished, or that ended in the step under way."""

    service_class: str
    slo: SLO
    predicted_ttft_s: float | None
    """The TTFT that admission predicted, in seconds from arrival."""


class StepLog:
    """Counts, traces and learns. Not thread-safe.

    Args:
        shape: The model's, for the features of a step.
        latency: Told of every whole step; None: there is no latency model.
        tracer: Closed with the log; None: nothing is traced.
    """

    def __init__(self, shape: ModelShape, *, latency: CorrectedModel | None, tracer: StepTracer | None) -> None:
        self._shape = shape
        self._latency = latency
        self._tracer = tracer
        self.num_steps = 0
        self.seconds = 0.0
        self.num_device_tokens = 0
        self.num_piggyback_rows = 0

    def record(
        self,
        plan: StepPlan,
        result: StepOutput,
        outputs: Sequence[RequestOutput],
        *,
        host_works: bool,
        started_s: float,
        seconds: float,
        requests: Mapping[str, OpenRequest],
    ) -> None:
        """Take a step that computed something.

        Args:
            plan: The step.
            result: What the runner made of it.
            outputs: What requests got from it.
            host_works: The host tier worked meanwhile.
            started_s: When it began, on the clock of the outputs' times.
            seconds: How long it took.
            requests: Those of the plan and of the outputs, at least.
        """
        self.num_steps += 1
        self.seconds += seconds
        self.num_device_tokens += plan.num_device_tokens
        self.num_piggyback_rows += len(plan.joins)
        if self._tracer is None and self._latency is None:
            return
        features = features_of(plan, self._shape, host_works=host_works)
        if self._tracer is not None:
            terms: dict[str, float] = {}
            if self._latency is not None:
                terms = dict(zip(self._latency.term_names, self._latency.terms(features), strict=True))
            self._tracer.record(
                plan, started_s=started_s, seconds=seconds, features=dataclasses.asdict(features), terms=terms,
                halted=result.halted, outputs=outputs, slos={name: entry.slo for name, entry in requests.items()},
                classes={name: entry.service_class for name, entry in requests.items()},
            )  # fmt: skip
        if self._latency is not None and is_whole(plan, result.halted):
            self._latency.observe(features, seconds)

    def close(self) -> None:
        """End the trace. A second call does nothing."""
        if self._tracer is not None:
            self._tracer.close()
