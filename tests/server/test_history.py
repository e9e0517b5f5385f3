"""Tests of what charts are made of: quantiles, rates and shares of readings, kept in bounded memory."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from omniserve.core.request import SLO, ClassSpec, FinishReason
from omniserve.core.stats import EngineStats, KVUsage, LatencyStats, SchedulerStats
from omniserve.server.choice import Times
from omniserve.server.dashboard.history import History
from omniserve.server.dashboard.series import Reading, chart_values, quantile, read
from omniserve.server.telemetry.metrics import ServerMetrics

LS_SLO = SLO(ttft_s=0.33, tpot_s=0.055)
CLASSES = (ClassSpec(name="LS", kind="LS", slo=LS_SLO), ClassSpec(name="BE", kind="BE"))


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics(["LS", "BE"], [spec.slo for spec in CLASSES])


def look(metrics: ServerMetrics, clock_s: float = 0.0, **stats) -> Reading:
    """Return a reading; without statistics, of a server whose engine is gone."""
    families = metrics.collect(EngineStats(**stats) if stats else None)
    return read(families, clock_s=clock_s, time_s=1000 + clock_s, engine="up" if stats else "it died")


def finish(metrics: ServerMetrics, ttft_s: float, tpot_s: float) -> None:
    """Let an LS request of 11 tokens end."""
    times = Times(arrival_s=0.0, first_token_s=ttft_s, last_token_s=ttft_s + 10 * tpot_s, num_tokens=11)
    request = SimpleNamespace(service_class="LS", deadline_s=None)
    metrics.finished(
        SimpleNamespace(
            request=request, slo=LS_SLO, times=times, finish_reason=FinishReason.STOP, predicted_ttft_s=ttft_s - 0.06
        )
    )


def test_quantile_is_off_by_a_bucket_at_most():
    rng = random.Random(0)
    bounds = [0.1, 0.2, 0.5, 1.0, 2.0, math.inf]
    for _ in range(200):
        values = sorted(rng.choice([rng.random(), 3 * rng.random()]) for _ in range(rng.randrange(1, 40)))
        counts = {bound: sum(value <= bound for value in values) for bound in bounds}
        for share in (0.5, 0.99):
            exact = values[math.ceil(share * len(values)) - 1]
            above = next(bound for bound in bounds if exact <= bound)
            below = max([0.0, *(bound for bound in bounds if bound < exact)])
            assert below <= quantile(share, counts) <= min(above, 2.0)


def test_quantile_of_buckets_below_zero():
    assert quantile(0.5, {-1.0: 0, 0.0: 4, math.inf: 4}) == -0.5
    assert quantile(0.5, {-1.0: 4, 0.0: 4, math.inf: 4}) == -1.0


def test_quantile_of_nothing_is_none():
    assert quantile(0.5, {}) is None
    assert quantile(0.5, {1.0: 0, math.inf: 0}) is None


def test_window_counts_only_what_ended_in_it(metrics):
    finish(metrics, ttft_s=60.0, tpot_s=4.0)
    before = look(metrics, steps=1)
    for i in range(10):
        finish(metrics, ttft_s=0.1 if i < 9 else 0.5, tpot_s=0.019)
    values = chart_values(CLASSES, look(metrics, 30.0, steps=2), None, before)
    assert values["ttft_p50:LS"] <= 0.1
    assert 0.35 < values["ttft_p99:LS"] <= 0.5
    assert values["tpot_p99:LS"] <= 0.02
    assert values["ttft_met:LS"] == pytest.approx(0.9)
    assert values["tpot_met:LS"] == 1.0
    assert 0.05 <= values["ttft_error_p50:LS"] <= 0.1
    assert values["ttft_p50:BE"] is values["ttft_met:BE"] is None


@pytest.mark.parametrize(("ttft_s", "is_kept"), [(0.329, True), (0.331, False)])
def test_quantile_is_on_the_right_side_of_the_objective(metrics, ttft_s, is_kept):
    before = look(metrics)
    finish(metrics, ttft_s=ttft_s, tpot_s=0.01)
    values = chart_values(CLASSES, look(metrics, 1.0), before, before)
    assert (values["ttft_p99:LS"] <= LS_SLO.ttft_s) is is_kept
    assert values["ttft_met:LS"] == is_kept


def test_rates_and_gauges(metrics):
    begun = SchedulerStats(output_tokens={"LS": 5, "BE": 100}, prompt_tokens={"BE": 7}, host_output_tokens=40)
    scheduler = SchedulerStats(
        waiting={"LS": 3, "BE": 4},
        running={"LS": 1, "BE": 2},
        output_tokens={"LS": 25, "BE": 200},
        prompt_tokens={"BE": 47},
        host_output_tokens=110,
        ls_host_output_tokens=10,
    )
    before = look(metrics, scheduler=begun, steps=1)
    now = look(
        metrics,
        2.0,
        scheduler=scheduler,
        kv=KVUsage(device_used=25, device_total=100),
        latency=LatencyStats(error=0.25, drift=1.5),
        piggyback_rows=600,
        steps=11,
        step_seconds=0.5,
    )
    metrics.rejected("LS")
    values = chart_values(CLASSES, now, before, before)
    expected = {
        "output_rate:LS": 10,
        "be_prompt_rate": 20,
        "be_host_rate": 30,
        "be_device_rate": 20,
        "kv_device": 0.25,
        "kv_host": None,
        "piggyback_rate": 300,
        "step_time": 0.05,
        "step_error": 0.25,
        "step_drift": 1.5,
        "waiting:BE": 4,
        "running:LS": 1,
        "rejected:LS": 0,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert chart_values(CLASSES, look(metrics, 3.0), now, now)["rejected:LS"] == 1


def test_errors_of_predictions_are_of_steps_that_were_made_lately(metrics):
    latency = LatencyStats(error=0.39, drift=1.7)
    idle, later = look(metrics, steps=7, latency=latency), look(metrics, 5.0, steps=7, latency=latency)
    values = chart_values(CLASSES, later, idle, idle)
    assert values["step_error"] is values["step_drift"] is values["step_time"] is None
    values = chart_values(CLASSES, look(metrics, 6.0, steps=8, latency=latency), later, idle)
    assert (values["step_error"], values["step_drift"]) == (0.39, 1.7)


def test_counters_of_a_new_engine_begin_again(metrics):
    before = look(metrics, piggyback_rows=1000)
    values = chart_values(CLASSES, look(metrics, 2.0, piggyback_rows=10), before, before)
    assert values["piggyback_rate"] == 5


def test_without_an_engine_its_values_are_missing_and_the_others_are_not(metrics):
    before = look(metrics, piggyback_rows=1000)
    finish(metrics, ttft_s=0.1, tpot_s=0.01)
    values = chart_values(CLASSES, look(metrics, 2.0), before, before)
    assert values["piggyback_rate"] is values["kv_device"] is values["waiting:LS"] is values["be_device_rate"] is None
    assert values["ttft_p50:LS"] is not None


@pytest.fixture
def history() -> History:
    async def never() -> Reading:
        raise AssertionError

    return History(never, CLASSES)


def test_history_tells_what_is_new(history, metrics):
    for i in range(5):
        history.add(look(metrics, i, piggyback_rows=10 * i))
    everything = history.since(None, -1)
    assert everything["times"] == [1000, 1001, 1002, 1003, 1004]
    assert everything["series"]["piggyback_rate"] == (None, 10, 10, 10, 10)
    assert everything["latest"]["engine"] == "up"
    history.add(look(metrics, 5))
    news = history.since(everything["run"], everything["last"])
    assert news["times"] == [1005] and news["series"]["piggyback_rate"] == (None,)
    assert news["latest"]["engine"] == "it died"
    assert history.since(news["run"], news["last"])["times"] == []
    assert len(history.since("another server's", news["last"])["times"]) == 6


def test_history_is_bounded_and_its_window_slides(history, metrics):
    finish(metrics, ttft_s=0.1, tpot_s=0.01)
    history.add(look(metrics, 0.0, steps=1))
    finish(metrics, ttft_s=0.2, tpot_s=0.01)
    for i in range(1, 1000):
        history.add(look(metrics, i, steps=1))
    data = history.since(None, -1)
    assert len(data["times"]) == data["capacity"] == 900 and data["times"][-1] == 1999
    assert len(history._readings) == data["window_s"] + 1
    assert all(len(column) == 900 for column in data["series"].values())
    assert data["series"]["ttft_p50:LS"][-1] is None


def test_what_ended_a_window_ago_is_forgotten(history, metrics):
    history.add(look(metrics, 0.0))
    finish(metrics, ttft_s=0.1, tpot_s=0.01)
    for i in range(1, 70):
        history.add(look(metrics, i))
    shown = [value is not None for value in history.since(None, -1)["series"]["ttft_p50:LS"]]
    assert shown == [False] + 60 * [True] + 9 * [False]


def test_times_rise_when_the_clock_is_set_back(history, metrics):
    for clock_s, time_s in ((0, 100), (1, 101), (2, 50)):
        history.add(read(metrics.collect(None), clock_s=clock_s, time_s=time_s, engine="up"))
    times = history.since(None, -1)["times"]
    assert times == sorted(set(times)) and len(times) == 3
