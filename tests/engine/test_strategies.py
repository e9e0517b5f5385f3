"""A made-up strategy of the layer loop: its hooks see the steps that it asks for, and no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from omniserve import Engine, Request, SamplingParams
from omniserve.core.plan import StepPlan
from omniserve.runner.layer_loop import StepHooks, StepRun
from omniserve.runner.step_inputs import LayersOutput


class Prompts:
    """Steps with prompts are watched."""

    def __init__(self, *, stops: bool) -> None:
        self._stops = stops
        self.calls: list[str] = []

    def hooks(self, plan: StepPlan) -> StepHooks | None:
        is_prompt = any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
        return Watch(self.calls, stops=self._stops) if is_prompt else None

    def forget(self, request_id: str) -> None:
        self.calls.append(f"forget {request_id}")


class Watch(StepHooks):
    """Notes its calls, and turns the order of the rows around that are sampled."""

    def __init__(self, calls: list[str], *, stops: bool) -> None:
        self._calls, self.stops = calls, stops

    def first_rows(self, plan: StepPlan) -> StepPlan:
        self._calls.append("first rows")
        return plan

    def begin(self, run: StepRun) -> None:
        self._calls.append("begin")

    def before_layer(self, run: StepRun, layer: int) -> None:
        self._calls.append(f"before {layer}")

    def after_layer(self, run: StepRun, layer: int) -> None:
        self._calls.append(f"after {layer}")

    def finish(self, run: StepRun, output: LayersOutput) -> LayersOutput:
        self._calls.append("finish")
        sampled = output.sampled
        turned = dataclasses.replace(sampled, rows=sampled.rows.flip(0), request_ids=sampled.request_ids[::-1])
        return dataclasses.replace(output, sampled=turned)


@pytest.mark.parametrize("stops", [False, True])
def test_a_strategy_sees_the_steps_that_it_asks_for(make_engine: Callable[..., Engine], stops: bool) -> None:
    prompts = [Request(prompt_token_ids=[n, 2, 3], sampling=SamplingParams(max_tokens=3)) for n in (4, 5)]
    expected = [completion.token_ids for completion in make_engine().generate(prompts)]
    engine, strategy = make_engine(), Prompts(stops=stops)
    engine.runner.strategies += (strategy,)
    assert [completion.token_ids for completion in engine.generate(prompts)] == expected
    layers = range(engine.spec.num_layers) if stops else [0]
    passed = [f"{when} {layer}" for layer in layers for when in ("before", "after")]
    assert strategy.calls == ["first rows", "begin", *passed, "finish", "forget req-0", "forget req-1"]
