"""Traces with known causes: each miss is put down to what made it."""

from __future__ import annotations

import pytest

from omniserve.core.config import DEFAULT_CLASSES
from omniserve.core.request import ServiceClass
from omniserve.latency.explain import CAUSES, causes_of, main, main_cause
from omniserve.latency.trace import Outcome, StepTracer, Trace, TracedStep

KINDS = {"LS": ServiceClass.LS, "BE": ServiceClass.BE}
OWN, OTHER_LS, OTHER_DECODE, BEST_EFFORT = ("r", "LS", 0, 10), ("p", "LS", 0, 30), ("d", "LS", 5, 1), ("x", "BE", 0, 30)


def step(start_s, end_s, *chunks, predicted_s=None, predicted_ls_s=None, left_out=(), joins=(), entries=(), **fields):
    return TracedStep(
        step=0, started_s=start_s, measured_s=end_s - start_s, predicted_s=predicted_s, predicted_ls_s=predicted_ls_s,
        bound_s=None, bound_by="", features={}, terms={}, scheduled={}, chunks=list(chunks), entries=list(entries),
        joins=list(joins), moves=[], left_out=list(left_out), **fields,
    )  # fmt: skip


def outcome(objective="ttft", from_s=1.0, to_s=3.0, request_id="r", service_class="LS", limit_s=0.5):
    seconds = to_s - from_s
    return Outcome(
        request_id=request_id, service_class=service_class, objective=objective, seconds=seconds, limit_s=limit_s,
        met=None if limit_s is None else seconds <= limit_s, from_s=from_s, to_s=to_s, first_scheduled_s=None,
        predicted_s=0.25,
    )  # fmt: skip


def memory(work, first):
    return [(work, 1, first, "memory")]


# From 1 s to 3 s; what is not told is 0.
KNOWN = {
    "no step runs": ([], {"waiting": 2}),
    "others decode": ([step(0, 2, OTHER_DECODE), step(2, 3, OWN)], {"waiting": 1, "own work": 1}),
    "another prompt is ahead": ([step(0.5, 2.5, OTHER_LS), step(2.5, 3, OWN)], {"LS prefill": 1.5, "own work": 0.5}),
    "another prompt beside it": ([step(1, 3, OWN, OTHER_LS)], {"LS prefill": 1.5, "own work": 0.5}),
    "no memory for it": (
        [step(1, 2.75, OTHER_DECODE, left_out=memory("LS prefill", "r")), step(2.75, 3, OWN)],
        {"memory": 1.75, "own work": 0.25},
    ),
    "no memory for one before it": (
        [step(1, 2.75, OTHER_LS, left_out=memory("LS prefill", "p")), step(2.75, 3, OWN)],
        {"memory": 1.75, "own work": 0.25},
    ),
    "no memory for best effort is none of its business": (
        [step(1, 2, OTHER_DECODE, left_out=memory("BE prefill", "x")), step(2, 3, OWN)],
        {"waiting": 1, "own work": 1},
    ),
    "best effort before it, by prediction": (
        [step(1, 2, BEST_EFFORT, OTHER_DECODE, predicted_s=1, predicted_ls_s=0.25), step(2, 3, OWN)],
        {"best effort": 0.75, "waiting": 0.25, "own work": 1},
    ),
    "best effort beside it, by prediction": (
        [step(1, 3, OWN, BEST_EFFORT, predicted_s=2, predicted_ls_s=0.5)],
        {"best effort": 1.5, "own work": 0.5},
    ),
    "best effort beside it, by rows": ([step(1, 3, OWN, BEST_EFFORT)], {"best effort": 1.5, "own work": 0.5}),
    "its step took longer than predicted": (
        [step(1, 3, OWN, predicted_s=0.5, predicted_ls_s=0.5)],
        {"misprediction": 1.5, "own work": 0.5},
    ),
    "the step before it took longer than predicted": (
        [step(0, 2, OTHER_DECODE, predicted_s=1.25, predicted_ls_s=1.25), step(2, 3, OWN)],
        {"misprediction": 0.75, "waiting": 0.25, "own work": 1},
    ),
    "its step was shorter than predicted": ([step(1, 3, OWN, predicted_s=5, predicted_ls_s=5)], {"own work": 2}),
    "it is long itself": ([step(0, 1, OTHER_LS), step(1, 3, OWN), step(3, 4, BEST_EFFORT)], {"own work": 2}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_causes_of_a_miss(name):
    steps, expected = KNOWN[name]
    causes = causes_of(outcome(), Trace(kinds=KINDS, steps=steps))
    assert causes == pytest.approx(dict.fromkeys(CAUSES, 0.0) | expected)
    assert sum(causes.values()) == pytest.approx(2.0)
    assert main_cause(causes) == max(expected, key=expected.get)


def test_best_effort_requests_own_rows_are_its_own_work():
    steps = [step(1, 2, ("x", "BE", 0, 10), ("y", "BE", 0, 30)), step(2, 3, joins=[("x", 0), ("z", 0)], entries=["w"])]
    causes = causes_of(outcome(request_id="x", service_class="BE"), Trace(kinds=KINDS, steps=steps))
    assert causes["best effort"] == pytest.approx(0.75 + 2 / 3)
    assert causes["own work"] == pytest.approx(0.25 + 1 / 3)


def test_time_per_token_counts_from_first_token_to_end():
    steps = [
        step(0, 1, OWN),
        step(1, 2, ("r", "LS", 10, 1), BEST_EFFORT),
        step(2, 2.5, OTHER_DECODE),
        step(2.5, 3, OWN),
    ]
    causes = causes_of(outcome("tpot"), Trace(kinds=KINDS, steps=steps))
    assert causes["best effort"] == pytest.approx(30 / 31)
    assert (causes["waiting"], causes["own work"]) == pytest.approx((0.5, 0.5 + 1 / 31))


@pytest.fixture
def explain(tmp_path, capsys):
    def explain(steps, *flags):
        path = tmp_path / "steps"
        tracer = StepTracer(path, classes=DEFAULT_CLASSES)
        for each in steps:
            tracer._write(vars(each))
        tracer.close()
        assert main([str(path), *flags]) == 0
        return capsys.readouterr().out

    return explain


def table(text, title):
    """Return a table's lines without header, cells separated by two spaces or more."""
    [_, body] = text.split(f"\n{title}\n")
    lines = body.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]


def test_report(explain):
    worst = {"terms": {"dense": 0.4, "head": 0.05, "row overhead": 0.01, "tiny": 0.001}}
    steps = [
        step(0, 1, OTHER_LS, predicted_s=1.25, predicted_ls_s=1.25, outcomes=[outcome(from_s=0.75, to_s=1)]),
        step(1, 3, OWN, predicted_s=0.5, predicted_ls_s=0.5, outcomes=[outcome(), outcome("tpot", limit_s=9)],
             left_out=[("BE prefill", 2, "x", "time"), ("BE decode", 2, "y", "order")]),
        step(3, 4, BEST_EFFORT, predicted_s=1, predicted_ls_s=0, left_out=[("BE prefill", 2, "x", "time")],
             outcomes=[outcome("tpot", 3, 4, "x", "BE", None)]),
    ]  # fmt: skip
    for name, value in (("terms", worst["terms"]), ("features", {"seats": 0, "decode_requests": 3})):
        object.__setattr__(steps[1], name, value)
    text = explain(steps)
    assert "3 steps in 4.0 s" in text
    assert "3 predicted: accuracy 66.7% on average, 25.0% at P90" in text
    first, second, _ = table(text, "Worst predictions (ms)")
    assert first[1:5] == ["500.0", "2000.0", "4.00", "+1500.0"]
    assert first[5:] == ["dense 400.0, head 50.0, row overhead 10.0", "decode_requests=3"]
    assert second[1:5] == ["1250.0", "1000.0", "0.80", "-250.0"]
    assert table(text, "Objectives") == [
        ["LS", "ttft", "2", "1 of 2", "50.0%", "1125.0", "2000.0"],
        ["LS", "tpot", "1", "1 of 1", "100.0%", "2000.0", "2000.0"],
        ["BE", "tpot", "1", "-", "-", "1000.0", "1000.0"],
    ]
    assert table(text, "Missed objectives by main cause") == [["LS", "ttft", "misprediction", "1"]]
    assert table(text, "Worst of 1 misses, and what their time went to") == [
        ["r", "LS", "ttft", "2000.0", "500.0", "250.0", "0%", "0%", "0%", "0%", "75%", "25%", "misprediction"]
    ]
    assert table(text, "Steps in which a bound stopped work") == [["BE decode", "1", "-"], ["BE prefill", "-", "2"]]


def test_top_limits_the_worst(explain):
    steps = [step(i, i + 1, OWN, predicted_s=0.5, outcomes=[outcome(from_s=i, to_s=i + 1)]) for i in range(5)]
    text = explain(steps, "--top", "2")
    assert len(table(text, "Worst predictions (ms)")) == 2
    assert len(table(text, "Worst of 5 misses, and what their time went to")) == 2
    assert table(text, "Missed objectives by main cause")[0][-1] == "5"


def test_steps_of_some_layers_only_are_not_judged(explain):
    fields = {"halted": {"x": 3}, "resumed": {}}, {"halted": {}, "resumed": {"x": 3}}, {}
    steps = [step(i, i + 1, BEST_EFFORT, predicted_s=i + 2, **fields[i]) for i in range(3)]
    text = explain(steps)
    assert "2 of them computed a part of their layers" in text
    assert "1 predicted: accuracy -200.0%" in text
    assert "No whole step was predicted.\n" in explain(steps[:2])


def test_engine_without_latency_model(explain):
    text = explain([step(0, 1, OWN, outcomes=[outcome(from_s=0, to_s=1)])])
    assert "No step was predicted: the engine had no latency model" in text
    assert table(text, "Missed objectives by main cause") == [["LS", "ttft", "own work", "1"]]


def test_wrong_files_end_with_status_2(tmp_path, capsys):
    path = tmp_path / "steps"
    assert main([str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_text("some other file\n")
    assert main([str(path)]) == 2
    assert "is no trace of steps" in capsys.readouterr().err
    StepTracer(path, classes=DEFAULT_CLASSES).close()
    assert main([str(path)]) == 2
    assert "has no step yet" in capsys.readouterr().err
