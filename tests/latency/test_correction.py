"""CorrectedModel: learns drift within bounds, not from outliers; says so once when the bounds are left."""

from __future__ import annotations

import random
import statistics

import pytest

from omniserve.latency import BatchFeatures, CorrectedModel, accuracy_of
from omniserve.latency.correction import COARSE_MARGIN, StepPace
from omniserve.latency.linear import ConServeModel
from omniserve.latency.omniserve import OmniServeModel
from tests.latency.samples import draw_steps, make_profile

MODEL = OmniServeModel(make_profile())


def drifted(factor: float):
    return lambda features: factor * MODEL.step_s(features)


def observe_one(model: CorrectedModel, features: BatchFeatures, seconds: float) -> None:
    """Let a model learn from a step that follows the one before it without a pause."""
    model.observe(features, seconds, (model._last_s or 0.0) + seconds)


def observe(model: CorrectedModel, steps) -> None:
    """Let a model learn from steps that follow one another without a pause."""
    for step in steps:
        observe_one(model, step.features, step.seconds)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_it_follows_a_machine_that_drifted(factor: float) -> None:
    model = CorrectedModel(MODEL)
    observe(model, draw_steps(1, 1500, drifted(factor), noise=0.05))
    assert accuracy_of(model, draw_steps(2, 200, drifted(factor))).mean > 0.98
    assert model.drift == pytest.approx(factor, rel=0.03)
    assert model.error < 0.05
    assert not model.has_drifted


def test_what_slowed_down_is_what_is_corrected() -> None:
    dense = MODEL.term_names.index("dense, more rows")
    attention = MODEL.term_names.index("prefill attention")

    def slow_dense(features):
        return MODEL.step_s(features) + 0.3 * MODEL.terms(features)[dense]

    model = CorrectedModel(MODEL)
    observe(model, draw_steps(1, 2000, slow_dense))
    assert model.factors[dense] > 1.2
    assert model.factors[attention] < model.factors[dense]


def test_factors_and_pace_stay_within_their_bounds() -> None:
    model = CorrectedModel(MODEL, rate=0.2)
    observe(model, draw_steps(1, 500, drifted(30.0)))
    assert max(model.factors) == 1.5
    assert model.pace == 16
    observe(model, draw_steps(2, 1000, drifted(0.01)))
    assert min(model.factors) == 0.7
    assert model.pace == 1 / 16


@pytest.mark.parametrize("factor", [0.3, 1.4, 6.0])
def test_a_machine_that_others_begin_and_cease_to_use_is_followed_at_once(factor: float) -> None:
    model = CorrectedModel(MODEL)
    observe(model, draw_steps(1, 300, drifted(1.0), noise=0.05))
    for seed, now in ((2, factor), (4, 1.0)):
        observe(model, draw_steps(seed, 5, drifted(now), noise=0.02))
        assert accuracy_of(model, draw_steps(seed + 1, 50, drifted(now))).mean > 0.9
        observe(model, draw_steps(seed, 500, drifted(now), noise=0.05))
        assert model.error < 0.06, "of what was predicted, the pace included"


def test_the_pace_is_the_median_of_the_last_nine() -> None:
    rng, pace, ratios = random.Random(3), StepPace(), [1.0] * 9
    for _ in range(500):
        ratios.append(rng.choice([1.0, rng.uniform(0.5, 4)]))
        pace.observe(ratios[-1])
        assert pace.value == pytest.approx(statistics.median(ratios[-9:]))


def test_one_odd_step_moves_little() -> None:
    model = CorrectedModel(MODEL)
    steps = draw_steps(1, 300, drifted(1.0))
    observe(model, steps)
    observe_one(model, steps[0].features, 100 * steps[0].seconds)
    assert max(abs(factor - 1) for factor in model.factors) <= 0.0201
    assert accuracy_of(model, steps).mean > 0.97


def test_rare_outliers_do_not_raise_the_predictions_much() -> None:
    rng = random.Random(0)
    model = CorrectedModel(MODEL)
    for step in draw_steps(1, 1000, drifted(1.0), noise=0.02):
        observe_one(model, step.features, step.seconds * (20 if rng.random() < 0.01 else 1))
    assert accuracy_of(model, draw_steps(2, 200, drifted(1.0))).mean > 0.95


def test_a_drift_that_lasts_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = CorrectedModel(MODEL)
    usual, slow = (draw_steps(seed, 1200, drifted(factor)) for seed, factor in ((1, 1.0), (2, 3.0)))
    for _ in range(3):  # a neighbour that comes and goes
        observe(model, slow[:900] + usual[:200])
    assert not caplog.records
    assert not model.has_drifted
    observe(model, slow + slow)
    assert model.has_drifted
    assert len(caplog.records) == 1
    assert "omniserve.profile" in caplog.text
    assert model.drift == pytest.approx(3.0, rel=0.05)


def test_steps_without_time_or_work_are_left_out() -> None:
    model = CorrectedModel(MODEL)
    step = draw_steps(1, 1, drifted(1.0))[0]
    observe_one(model, step.features, 0.0)
    idle = CorrectedModel(ConServeModel((1e-5, 1e-9, 1e-7, 0.0), 4))
    observe_one(idle, BatchFeatures(), 1.0)
    for corrected in (model, idle):
        assert corrected.factors == (1.0,) * len(corrected.term_names)
        assert (corrected.error, corrected.drift, corrected.pace) == (0.0, 1.0, 1.0)


def test_its_terms_are_the_models_times_the_factors_and_the_pace() -> None:
    model = CorrectedModel(MODEL)
    observe(model, draw_steps(1, 20, drifted(1.2)))
    assert model.pace > 1.05
    assert max(model.factors) > 1.01
    features = draw_steps(3, 1, drifted(1.0))[0].features
    expected = [model.pace * f * t for f, t in zip(model.factors, MODEL.terms(features), strict=True)]
    assert list(model.terms(features)) == pytest.approx(expected)
    assert model.step_s(features) == pytest.approx(sum(expected))
    assert sum(model.modules_s(features)) == pytest.approx(sum(expected[MODEL.layer_terms]) / MODEL.num_layers)


@pytest.mark.parametrize(("settings", "word"), [({"rate": 0.0}, "rate"), ({"bounds": (1.1, 1.5)}, "bounds")])
def test_bad_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        CorrectedModel(MODEL, **settings)  # type: ignore[arg-type]


def test_a_margin_is_part_of_predictions_and_not_of_what_is_learned() -> None:
    plain, wide = CorrectedModel(MODEL), CorrectedModel(MODEL, is_coarse=True)
    features = BatchFeatures(decode_requests=3, decode_context=60, decode_load=60.0, sampled_rows=3, dense_layers=4.0)
    for _ in range(50):
        seconds = 1.2 * MODEL.step_s(features)
        observe_one(plain, features, seconds)
        observe_one(wide, features, seconds)
    assert wide.factors == plain.factors and wide.pace == plain.pace and wide.error == plain.error
    assert wide.step_s(features) == pytest.approx(COARSE_MARGIN * plain.step_s(features))
    wide.replace(MODEL)
    assert wide.step_s(features) == MODEL.step_s(features) and wide.drift == 1.0 and not wide.is_coarse
