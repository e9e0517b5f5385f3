"""The engine with a latency profile: refusals, predictions, learning, traces."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from omniserve import SLO, Engine, EngineConfig, ExecutionConfig, Request, RequestRejected, SamplingParams
from omniserve.core.request import Arrival
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.latency import ModelShape, Profile, ProfileMismatch
from omniserve.latency.correction import COARSE_MARGIN
from omniserve.latency.trace import read_steps
from tests.latency.samples import make_profile
from tests.sched import preemptible

CONFIG = EngineConfig(
    execution=ExecutionConfig(compile=False), host_threads=1, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20
)


def profile_for(model: PreTrainedModel, config: EngineConfig) -> Profile:
    """Return a made-up profile that claims to be this model's."""
    return dataclasses.replace(
        make_profile(), fingerprint=fingerprint_of(model, config), shape=ModelShape.of(model.omniserve.spec)
    )


def request(num_prompt: int = 20, num_output: int = 4, **slo: float) -> Request:
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return Request(prompt_token_ids=[3] * num_prompt, sampling=sampling, slo=SLO(**slo))


def run(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def test_a_profile_of_another_model_or_setting_is_refused(model: PreTrainedModel) -> None:
    profile = profile_for(model, CONFIG)
    with pytest.raises(ProfileMismatch, match=r"block_size: 64, not 16.*omniserve\.profile"):
        Engine(model, dataclasses.replace(CONFIG, block_size=16), profile=profile)


def test_a_rejected_request_leaves_nothing_behind(model: PreTrainedModel) -> None:
    with Engine(model, CONFIG, profile=profile_for(model, CONFIG)) as engine:
        with pytest.raises(RequestRejected, match=r"relax slo\.ttft_s"):
            engine.add(dataclasses.replace(request(ttft_s=1e-6), request_id="mine"))
        assert not engine.has_unfinished and engine.stats().scheduler.rejected == {"LS": 1, "BE": 0}
        engine.add(dataclasses.replace(request(), request_id="mine"))
        run(engine)


def test_time_before_the_engine_counts(model: PreTrainedModel) -> None:
    now_s = 100.0
    with Engine(model, CONFIG, profile=profile_for(model, CONFIG), clock=lambda: now_s) as engine:
        engine.add(request(ttft_s=0.5))
        with pytest.raises(RequestRejected):
            engine.add(request(ttft_s=0.5), arrival_s=now_s - 0.5)
        request_id = engine.add(request(), arrival_s=now_s - 7.0)
        predicted_s = engine.predicted_ttft_s(request_id)
        assert predicted_s is not None and 7.0 < predicted_s < 7.1


def test_without_a_profile_nothing_is_predicted_and_nobody_rejected(model: PreTrainedModel) -> None:
    with Engine(model, CONFIG) as engine:
        assert engine.predicted_ttft_s(engine.add(request(ttft_s=1e-9))) is None
        run(engine)
        assert engine.stats().latency.error == 0.0 and engine.stats().latency.drift == 1.0


def test_the_engine_learns_how_long_its_steps_take(model: PreTrainedModel) -> None:
    with Engine(model, CONFIG, profile=profile_for(model, CONFIG)) as engine:
        engine.add(request(num_output=40))
        run(engine)
        stats = engine.stats()
        assert stats.latency.error > 0 and stats.latency.drift != 1.0


def test_nothing_is_learnt_from_steps_that_rows_left_or_came_back_to(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    config = dataclasses.replace(CONFIG, trace_steps=str(path), scheduler=preemptible.NAME)
    with Engine(model, config, profile=profile_for(model, config)) as engine:
        engine.add(dataclasses.replace(request(num_output=1), service_class="BE"))
        assert engine.preemption is not None
        engine.preemption.arrivals = lambda: [Arrival(request())]
        for _ in range(2):
            engine.step()
            engine.preemption.arrivals = tuple
            assert engine.stats().latency.drift == 1.0
        engine.add(request(num_output=1))
        run(engine)
        assert engine.stats().latency.drift != 1.0
    assert [step.is_whole for step in read_steps(path).steps] == [False, False, True]


def test_a_trace_has_a_line_for_each_step_and_an_outcome_for_each_request(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    config = dataclasses.replace(CONFIG, trace_steps=str(path))
    with Engine(model, config, profile=profile_for(model, config)) as engine:
        ids = {engine.add(request(num_output=n, ttft_s=100.0, tpot_s=1e-9)) for n in (3, 5)}
        run(engine)
        num_steps = engine.stats().steps
    trace = read_steps(path)
    assert len(trace.steps) == num_steps
    assert all(step.predicted_s is not None and step.predicted_s > 0 for step in trace.steps)
    assert {outcome.request_id for step in trace.steps for outcome in step.outcomes} == ids


def test_a_margin_is_kept_until_a_coarse_profile_is_replaced(model: PreTrainedModel) -> None:
    refined, now_s = profile_for(model, CONFIG), 100.0
    coarse = dataclasses.replace(refined, is_coarse=True)

    def predicted_s(engine: Engine) -> float:
        request_id = engine.add(request())
        seconds = engine.predicted_ttft_s(request_id)
        engine.abort(request_id)
        assert seconds is not None
        return seconds

    with Engine(model, CONFIG, profile=coarse, clock=lambda: now_s) as engine:
        wide_s = predicted_s(engine)
        assert engine.stats().latency.is_coarse
        engine.use_profile(refined)
        assert not engine.stats().latency.is_coarse
        assert wide_s == pytest.approx(COARSE_MARGIN * predicted_s(engine))
        other = dataclasses.replace(refined, fingerprint=dataclasses.replace(refined.fingerprint, block_size=99))
        with pytest.raises(ProfileMismatch, match="block_size"):
            engine.use_profile(other)
    assert COARSE_MARGIN > 1
