"""An engine that serves a load in real time, in this process and without HTTP."""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.common.models import SMOLLM_135M
from benchmarks.validation.report import figures_of
from omniserve import SLO, Engine, Request, RequestRejected, SamplingParams
from omniserve.core.plan import StepPlan
from omniserve.latency import CorrectedModel, ModelShape, StepSample, features_of
from omniserve.simulate import Load
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.results import RequestResult, summarise


class EngineRun:
    """An engine that serves a load in real time, as ``simulate`` does on its clock.

    Args:
        engine: Without requests.
        load: What comes.
        seed: Of the prompts' tokens.
    """

    def __init__(self, engine: Engine, load: Load, seed: int) -> None:
        self._engine = engine
        self._shape = ModelShape.of(engine.spec)
        self._load = load
        self._rng = random.Random(seed)
        self._upcoming = list(reversed(load.latency_sensitive))
        self._pile = list(reversed(load.best_effort))
        self._results: dict[str, RequestResult] = {}
        self._unfinished = {"LS": 0, "BE": 0}
        self._began_s = 0.0
        self.steps: list[StepSample] = []
        """That computed something, in order."""

    def run(self) -> dict[str, Any]:
        """Serve the load; return its figures."""
        engine, duration_s = self._engine, self._load.duration_s
        assert duration_s is not None
        engine.on_step = self._watch
        before = engine.stats()
        self._began_s = time.monotonic()
        while (now_s := time.monotonic() - self._began_s) < duration_s:
            while self._pile and self._unfinished["BE"] < self._load.backlog:
                self._add(self._pile.pop(), "BE", now_s)
            while self._upcoming and self._upcoming[-1].arrival_s <= now_s:
                request = self._upcoming.pop()
                self._add(request, "LS", request.arrival_s)
            if not engine.has_unfinished:
                time.sleep(min(0.001, duration_s - now_s))
                continue
            self._step()
        at_end = engine.stats()
        while self._unfinished["LS"] and time.monotonic() - self._began_s < duration_s + 60:
            self._step()
        engine.on_step = None

        def counted(name: str) -> tuple[int, int]:
            return (
                at_end.output_tokens[name] - before.output_tokens.get(name, 0),
                at_end.prompt_tokens[name] - before.prompt_tokens.get(name, 0),
            )

        classes = {}
        for name, slo in ((spec.name, spec.slo) for spec in engine.config.classes):
            group = [result for result in self._results.values() if result.service_class == name]
            output, prompt = counted(name)
            classes[name] = summarise(group, slo, duration_s=duration_s, output_tokens=output, prompt_tokens=prompt)
        host_tokens = at_end.host_output_tokens - before.host_output_tokens
        return {
            "figures": figures_of(classes["LS"], classes["BE"]),
            "host_share": host_tokens / max(1, counted("BE")[0]),
            "num_steps": len(self.steps),
            "preemptions": at_end.preemptions - before.preemptions,
            "swaps_out": at_end.swaps_out - before.swaps_out,
            "step_error": at_end.latency_error,
            "drift": at_end.latency_drift,
            "requests": list(self._results.values()),
        }

    def _add(self, request: TraceRequest, name: str, arrival_s: float) -> None:
        result = RequestResult(name, arrival_s, request.input_tokens, request.output_tokens)
        request_id = f"{name}-{len(self._results)}"
        self._results[request_id] = result
        tokens = self._rng.choices(range(1, SMOLLM_135M["vocab_size"]), k=request.input_tokens)
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        try:
            self._engine.add(
                Request(prompt_token_ids=tokens, sampling=sampling, service_class=name, request_id=request_id),
                arrival_s=self._began_s + arrival_s,
            )
        except RequestRejected:
            result.rejected = True
        else:
            self._unfinished[name] += 1

    def _step(self) -> None:
        for output in self._engine.step():
            result, times = self._results[output.request_id], output.times
            assert times is not None
            if times.first_token_s is not None:
                result.first_token_s = times.first_token_s - self._began_s
            result.num_output_tokens, result.num_host_tokens = output.num_output_tokens, output.num_host_tokens
            if output.finished:
                assert times.finished_s is not None
                result.finished_s = times.finished_s - self._began_s
                self._unfinished[output.service_class] -= 1
        if self._engine.last_plan_was_empty:
            self._engine.wait(0.05)

    def _watch(self, plan: StepPlan, host_works: bool, seconds: float) -> None:
        features = features_of(plan, self._shape, host_works=host_works)
        self.steps.append(StepSample(features=features, seconds=seconds))


def warm_up(engine: Engine, learned: CorrectedModel) -> None:
    """Serve some requests of both classes; ``learned`` sees their steps."""
    shape = ModelShape.of(engine.spec)

    def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
        learned.observe(features_of(plan, shape, host_works=host_works), seconds)

    engine.on_step = watch
    for number in range(4):
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        name = "BE" if number % 2 else "LS"
        engine.add(Request(prompt_token_ids=[1] * 64, sampling=sampling, service_class=name, slo=SLO()))
    while engine.has_unfinished:
        engine.step()
        if engine.last_plan_was_empty:
            engine.wait(0.05)
    engine.on_step = None
