"""Profiles whose steps are a grid of rows and contexts, as in the papers of ConServe and BROS."""

from __future__ import annotations

from itertools import groupby

import pytest
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, patch
from omniserve.latency.features import AlphaBeta
from omniserve.latency.linear import BROSModel, ConServeModel
from omniserve.profiling import measure_steps, profile_model
from omniserve.profiling.loads import Arrival, grid_load
from tests.parity.models import tiny_model


def points(seed: int) -> list[tuple[int, int, int]]:
    """Return (requests, prompt, output) of each point of a grid."""
    arrivals = grid_load(seed, vocab_size=9, max_step=8, max_tokens=40, max_requests=4)
    found = []
    for _, group in groupby(arrivals, key=lambda arrival: arrival.at_step):
        requests = [arrival.request for arrival in group]
        shapes = {(len(request.prompt_token_ids), request.sampling.max_tokens) for request in requests}
        assert len(shapes) == 1 and all(request.sampling.ignore_eos for request in requests)
        found.append((len(requests), *shapes.pop()))
    return found


def test_a_grid_has_prefills_and_decodes_at_powers_of_two_in_each_round() -> None:
    prefills = {(1, context + rows, 1) for context in (0, 8, 16, 32) for rows in (1, 2, 4, 8)} - {(1, 40, 1)}
    outputs = {(g, c): 4 + -(-g * c // (8 - g)) for g in (1, 2, 4) for c in (1, 2, 4, 8, 16, 32)}
    decodes = {(g, c, output) for (g, c), output in outputs.items() if g * (c + output) <= 40}
    drawn = points(0)
    size = len(drawn) // 4
    for number in range(4):
        assert {*drawn[number * size : (number + 1) * size]} == prefills | decodes
    assert drawn[:size] != drawn[size : 2 * size] and points(0) == drawn != points(1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return patch(tiny_model("llama"), compile=False)


@pytest.fixture(scope="module")
def config(model: PreTrainedModel) -> EngineConfig:
    pool = 32 * model.omniserve.spec.kv_block_bytes(8)
    return EngineConfig(
        scheduler="conserve-paper", block_size=8, device_kv_bytes=pool, host_kv_bytes=pool, host_threads=1,
        kv="incremental", max_num_batched_tokens=16, max_num_seqs=4, execution=ExecutionConfig(compile=False),
    )  # fmt: skip


def test_steps_of_a_grid_are_its_points_and_fit_the_papers_models(model: PreTrainedModel, config: EngineConfig) -> None:
    load = grid_load(0, vocab_size=64, max_step=16, max_tokens=64, max_requests=4)
    with Engine(model, config) as engine:
        samples = measure_steps(engine, load[: len(load) // 4], max_samples=1000)
    features = [sample.features for sample in samples]
    assert {(f.prefill_tokens, f.prefill_context) for f in features if f.prefill_tokens > 1} >= {
        (rows, context) for rows in (2, 4, 8, 16) for context in (0, 16, 32)
    }
    decodes = {(f.decode_requests, f.decode_context) for f in features if not f.prefill_tokens}
    for count, least in ((1, 32), (2, 16), (4, 8)):
        assert any(requests == count and context >= count * least for requests, context in decodes), count
    for made in (ConServeModel((), 3), BROSModel((), 3, AlphaBeta())):
        fitted = made.fit(samples)
        assert all(fitted.step_s(each) > 0 for each in features)


def test_a_profile_in_a_grid_is_of_the_device_alone(
    model: PreTrainedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, int]] = []

    def noted(seed: int, **sizes: int) -> list[Arrival]:
        asked.append(sizes)
        return grid_load(seed, **sizes)

    monkeypatch.setattr("omniserve.profiling.steps.grid_load", noted)
    profile = profile_model(model, config, time_limit_s=0.5, in_grid=True)
    assert asked and profile.steps and profile.host_attention
    assert not any(step.features.host_works for step in profile.steps)
