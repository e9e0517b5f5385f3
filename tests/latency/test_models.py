"""Latency models: known coefficients are recovered, predictions are monotone, terms add up."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniserve.latency import LATENCY_MODELS, BatchFeatures, HostSpeed, StepSample, accuracy_of
from omniserve.latency.features import AlphaBeta
from omniserve.latency.fitting import fit_terms
from omniserve.latency.linear import BROSModel, ConServeModel
from omniserve.latency.omniserve import OmniServeModel
from tests.latency.samples import (
    LAYERS,
    SHAPE,
    decode_s,
    dense_s,
    draw_features,
    draw_steps,
    make_profile,
    prefill_s,
    with_chunk,
)

NAMES = LATENCY_MODELS.names()


def machine_s(features: BatchFeatures) -> float:
    """The made-up machine: modules as in its profile, 1.2 times slower within a step, and overheads."""
    factor = 1.8 if features.host_works else 1.0
    seconds = features.dense_layers * dense_s(features.rows)
    if features.prefill_tokens:
        seconds += LAYERS * (1e-8 * features.prefill_load + 2e-7 * features.prefill_tokens + 1e-5)
    if features.decode_requests:
        seconds += LAYERS * (3e-8 * features.decode_load + 1e-6 * features.decode_requests + 1e-5)
    seconds += 1e-4 + 1e-5 * features.sampled_rows if features.sampled_rows else 0.0
    return 1.2 * factor * seconds + 5e-4 + 2e-6 * features.rows


_STEPS = tuple(draw_steps(1, 100, machine_s))
MODELS = {name: LATENCY_MODELS.get(name).from_profile(make_profile(_STEPS)) for name in NAMES}


def test_ours_learns_a_machine_from_a_hundred_steps() -> None:
    model = OmniServeModel.from_profile(make_profile(tuple(draw_steps(1, 100, machine_s, noise=0.02))))
    accuracy = accuracy_of(model, draw_steps(2, 300, machine_s))
    assert accuracy.mean > 0.97
    assert accuracy.p90 > 0.95


def test_ours_is_right_before_any_step_if_the_modules_are_all() -> None:
    features = with_chunk(SHAPE, with_chunk(SHAPE, BatchFeatures(), 100, 32, samples=False), 500, 1, samples=True)
    expected = LAYERS * (dense_s(33) + prefill_s(32, 100) + decode_s(1, 501)) + 1.1e-4
    assert OmniServeModel(make_profile()).step_s(features) == pytest.approx(expected, rel=0.01)


def test_shared_cores_and_the_cores_alone_are_fitted_apart() -> None:
    model = MODELS["omniserve"]
    alone = with_chunk(SHAPE, BatchFeatures(), 100, 256, samples=False)
    shared = with_chunk(SHAPE, BatchFeatures(host_works=True), 100, 256, samples=False)
    for features in (alone, shared):
        assert model.step_s(features) == pytest.approx(machine_s(features), rel=0.05)


def test_conserve_recovers_its_polynomial() -> None:
    truth = ConServeModel((2e-5, 3e-9, 4e-7, 5e-3), LAYERS)
    model = ConServeModel.from_profile(make_profile(tuple(draw_steps(3, 100, truth.step_s))))
    assert accuracy_of(model, draw_steps(4, 100, truth.step_s)).p90 > 0.999


def test_bros_recovers_its_coefficients_whatever_waits_for_swaps() -> None:
    swap = AlphaBeta(alpha_s=2e-4, beta_s=2e-10)
    truth = BROSModel((2e-5, 1e-8, 3e-3, 1e-4, 2e-8, 4e-3), LAYERS, swap)
    steps = draw_steps(5, 100, truth.step_s)
    waited = BatchFeatures(decode_requests=1, decode_context=10, swap_bytes=10**9)
    assert truth.step_s(waited) == pytest.approx(swap(10**9))
    steps.append(StepSample(features=waited, seconds=truth.step_s(waited)))
    model = BROSModel.from_profile(make_profile(tuple(steps)))
    assert accuracy_of(model, draw_steps(6, 100, truth.step_s)).p90 > 0.999


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6), start=st.integers(0, 1000), count=st.integers(1, 400), samples=st.booleans())
def test_one_more_chunk_never_makes_a_step_shorter(name: str, seed: int, start: int, count: int, samples: bool) -> None:
    features = draw_features(random.Random(seed))
    more = with_chunk(SHAPE, features, start, count, samples=samples)
    assert MODELS[name].step_s(more) >= MODELS[name].step_s(features) * (1 - 1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6), start=st.integers(0, 1000), count=st.integers(2, 400))
def test_a_longer_chunk_never_takes_less_time(name: str, seed: int, start: int, count: int) -> None:
    features = draw_features(random.Random(seed))
    shorter = with_chunk(SHAPE, features, start, count, samples=True)
    longer = with_chunk(SHAPE, features, start, count + 1, samples=True)
    assert MODELS[name].step_s(longer) >= MODELS[name].step_s(shorter) * (1 - 1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_terms_are_named_not_negative_and_add_up(name: str, seed: int) -> None:
    model, features = MODELS[name], draw_features(random.Random(seed))
    terms = model.terms(features)
    assert len(terms) == len(model.term_names)
    assert min(terms) >= 0
    assert sum(terms) == pytest.approx(model.step_s(features))
    assert 0 <= sum(model.modules_s(features)) <= model.step_s(features) / LAYERS * (1 + 1e-12)


def test_what_piggyback_rows_add_grows_with_them() -> None:
    model = MODELS["omniserve"]
    features = with_chunk(SHAPE, BatchFeatures(host_works=True), 100, 1, samples=True)

    def step_s(seats: int, rows: int) -> float:
        return model.step_s(replace(features, seats=seats, piggyback_rows=rows, piggyback_layers=bool(rows)))

    assert step_s(0, 0) < step_s(8, 1) < step_s(8, 8) < step_s(32, 8)


def test_the_host_tiers_time_for_a_layer() -> None:
    host = HostSpeed.from_profile(make_profile())
    assert host is not None and host(0, 0) == 0
    assert host(8, 4096) == pytest.approx((1e-8 * 4096 + 8e-6) / host.threads + 3e-5, rel=0.01)
    assert host(8, 4096, 12288) == pytest.approx((1e-8 * 4096 + 4e-9 * 12288 + 8e-6) / host.threads + 3e-5, rel=0.01)
    twice = replace(host, threads=2 * host.threads)
    assert twice(8, 4096) == pytest.approx((1e-8 * 4096 + 8e-6) / twice.threads + 3e-5, rel=0.01)


def test_a_draft_takes_as_long_as_a_token_where_none_was_measured() -> None:
    host = HostSpeed.from_profile(replace(make_profile(), host_drafts=()))
    assert host is not None and host.per_draft_key_s == host.per_key_s > 0


def test_fit_terms_recovers_coefficients_in_spite_of_outliers() -> None:
    rng = random.Random(0)
    truth = (1e-3, 2e-5, 3e-8)
    rows = [(1.0, rng.uniform(0, 100), rng.uniform(0, 1e5)) for _ in range(100)]
    seconds = [sum(c * x for c, x in zip(truth, row, strict=True)) for row in rows]
    seconds[::20] = [10 * s for s in seconds[::20]]
    assert fit_terms(rows, seconds) == pytest.approx(truth, rel=0.05)


def test_fit_terms_gives_no_negative_coefficients() -> None:
    rows = [(1.0, x) for x in range(1, 30)]
    assert min(fit_terms(rows, [10.0 - 0.1 * x for _, x in rows])) >= 0


def test_fit_terms_keeps_to_its_prior_where_samples_say_nothing() -> None:
    assert fit_terms([(2.0, 0.0)] * 50, [6.0] * 50, prior=(1.0, 7.0), prior_weight=1.0) == pytest.approx(
        (3, 7), rel=0.15
    )


@pytest.mark.parametrize(
    ("rows", "seconds"), [([], []), ([(1.0,)], [1.0, 2.0]), ([(1.0,), (1.0, 2.0)], [1.0, 1.0]), ([(1.0,)], [0.0])]
)
def test_fit_terms_refuses_what_cannot_be_fitted(rows: list[tuple[float, ...]], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="fitting needs"):
        fit_terms(rows, seconds)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_cannot_be_fitted_to_nothing(name: str) -> None:
    with pytest.raises(ValueError, match="fitting needs"):
        MODELS[name].fit([])


def test_accuracy_counts_relative_errors() -> None:
    exact = ConServeModel((0.0, 0.0, 0.0, 1.0), LAYERS)  # always a second
    steps = [StepSample(features=BatchFeatures(decode_requests=1), seconds=s) for s in [1.0] * 8 + [2.0, 4.0]]
    accuracy = accuracy_of(exact, steps)
    assert accuracy.mean == pytest.approx(1 - (0.5 + 0.75) / 10)
    assert accuracy.p90 == pytest.approx(0.5)
    with pytest.raises(ValueError, match="measured steps"):
        accuracy_of(exact, [])


def test_policies_can_use_the_models_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them raises ImportError
import omniserve.latency as latency
model = latency.LATENCY_MODELS.get("conserve")((1e-5, 1e-9, 1e-7, 1e-3), 4)
print(latency.CorrectedModel(model).step_s(latency.BatchFeatures(decode_requests=1)) > 0, "sklearn" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]
