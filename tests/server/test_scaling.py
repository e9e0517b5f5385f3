"""The gauges of the engines that a server's load needs."""

from __future__ import annotations

import math

import pytest

from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.routing.need import Wanted
from omniserve.server.batches.urgency import Urgency
from omniserve.server.dashboard.series import Reading
from omniserve.server.telemetry.scaling import ScalingWatch

CLASSES = (ClassSpec(name="LS", kind=ServiceClass.LS, slo=SLO(ttft_s=1.0)), ClassSpec(name="BE", kind=ServiceClass.BE))


def reading(at_s, *, ended=0, refused=0, late=0, running=0, admittable=2.0, engine="up"):
    """Return a reading; counters are since the start."""
    values = {
        ("omniserve_requests_total", "LS", "stop"): ended,
        ("omniserve_requests_total", "BE", "stop"): 1000.0 * at_s,
        ("omniserve_requests_rejected_total", "LS"): refused,
        ("omniserve_requests_running", "LS"): running,
        ("omniserve_requests_waiting", "LS"): 0,
    }
    if admittable is not None:
        values["omniserve_admittable_requests_per_second", "LS"] = admittable
    buckets = {("omniserve_ttft_predicted_seconds", "LS"): {0.5: 0.0, 1.0: ended - late, 2.0: ended, math.inf: ended}}
    return Reading(clock_s=at_s, time_s=at_s, engine=engine, values=values, buckets=buckets)


def shown(watch):
    return {
        "".join(
            (sample.name.removeprefix("omniserve_"), *(f":{value}" for value in sample.labels.values()))
        ): sample.value
        for metric in watch.collect()
        for sample in metric.samples
    }


def test_nothing_is_shown_before_there_is_a_load_to_judge():
    watch = ScalingWatch(CLASSES)
    assert shown(watch) == {}
    watch.note(reading(0.0), 1)
    assert shown(watch) == {}


def test_the_need_is_of_what_came_within_the_window():
    watch = ScalingWatch(CLASSES)
    for second in range(100):
        watch.note(reading(float(second), ended=2 * max(0, second - 50), running=second % 2), 2)
    found = shown(watch)
    assert found["predicted_attainment:LS"] == 1.0
    assert found["load_use:LS"] == pytest.approx(0.5, rel=0.05), (
        "two a second came, and two more would have been let in"
    )
    assert found["replicas_needed:latency_sensitive"] == pytest.approx(2 * 0.5 / 0.7, rel=0.05)
    assert found["replicas_needed:batches"] == 0.0
    assert found["replicas_wanted"] == 2.0


def test_refused_and_late_requests_lower_the_predicted_attainment():
    watch = ScalingWatch(CLASSES, Wanted(up_s=0.0, down_s=300.0))
    watch.note(reading(0.0), 1)
    watch.note(reading(10.0, ended=60, late=20, refused=20, admittable=0.0), 1)
    found = shown(watch)
    assert found["predicted_attainment:LS"] == pytest.approx(0.5), "80 came; 20 were refused, 20 predicted to be late"
    assert found["replicas_needed:latency_sensitive"] == pytest.approx(2.0 / 0.7)
    assert found["replicas_wanted"] == 3.0


def test_an_engine_that_does_not_answer_is_no_load():
    watch = ScalingWatch(CLASSES)
    for second in range(5):
        watch.note(reading(float(second), ended=second), 1)
    before = shown(watch)
    watch.note(reading(5.0, engine="it died"), 0)
    assert shown(watch) == before


def test_without_predictions_only_batches_need_engines():
    watch = ScalingWatch(CLASSES)
    watch.batch_pressure = 1.5
    for second in range(3):
        watch.note(reading(float(second), ended=9 * second, admittable=None), 2)
    found = shown(watch)
    assert "predicted_attainment:LS" not in found
    assert found["replicas_needed:batches"] == pytest.approx(3.0) and found["batch_pressure"] == 1.5


def batch(*, total, done, left_s, problem=None):
    return {
        "id": "b", "total": total, "completed": done, "failed": 0, "expires_at": left_s, "may_escalate": True,
        "problem": problem,
    }  # fmt: skip


def test_batches_that_will_be_late_press():
    urgency = Urgency(concurrency=10)
    for second in range(100):
        urgency.judge(second, [batch(total=1000, done=second, left_s=100 + 450)], {"b": 10})
    # A line a second; 901 are left, for which there are 451 s, nine tenths of which may be used.
    assert urgency.pressure == pytest.approx(901 / (0.9 * 451), rel=0.05)
    urgency.judge(100, [batch(total=1000, done=100, left_s=550, problem="disk full")], {"b": 10})
    assert urgency.pressure == 0.0, "more engines would not help"
    urgency.judge(101, [], {})
    assert urgency.pressure == 0.0
