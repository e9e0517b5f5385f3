"""The trace of steps: what is written is what is read, and a trace that fails stops nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from omniserve.core.config import DEFAULT_CLASSES
from omniserve.core.plan import Bound, Decision, DeviceChunk, LeftOut, PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.request import SLO, FinishReason, RequestOutput, RequestTimes
from omniserve.core.work import DiskCopy, KVMove, MoveDirection
from omniserve.latency.trace import Outcome, StepTracer, read_steps

CLASSES = {"a": "LS", "b": "LS", "x": "BE", "y": "BE", "z": "BE"}


def chunk(request_id, num_tokens, start=0):
    return DeviceChunk(
        request_id=request_id, token_ids=(7,) * num_tokens, start=start, block_ids=(0,), samples=num_tokens == 1
    )


PLAN = StepPlan(
    step_id=3,
    chunks=(chunk("a", 30), chunk("b", 1, start=9), chunk("x", 8, start=8)),
    entries=(PiggybackEntry(request_id="y", token_id=1, position=5, slot=0, epoch=0, block_ids=(1,)),),
    joins=tuple(PiggybackJoin(request_id="z", position=6, slot=1, epoch=0, layer=layer) for layer in (2, 2, 4)),
    work=(
        KVMove(
            request_id="x", move_id=0, direction=MoveDirection.TO_HOST, src_block_ids=(1, 2), dst_block_ids=(3, 4),
            is_checkpoint=True,
        ),
    ),
    decision=Decision(
        predicted_s=0.5,
        predicted_ls_s=0.3,
        bound_s=0.6,
        bound_by="tpot of b",
        left_out=(LeftOut(work="BE prefill", num_requests=2, first_request_id="q", bound=Bound.TIME),),
    ),
)  # fmt: skip


def output(request_id="a", *, num_new=1, num_output=1, reason=None, times=None):
    return RequestOutput(
        request_id=request_id,
        service_class=CLASSES[request_id],
        new_token_ids=(5,) * num_new,
        num_output_tokens=num_output,
        finish_reason=reason,
        times=times,
    )


def record(tracer, plan=PLAN, *, outputs=(), slos=None, terms=None, halted=None):
    tracer.record(
        plan, started_s=10.0, seconds=0.25, features={"seats": 4}, terms=terms or {}, halted=halted or {},
        outputs=outputs, slos=slos or {}, classes=CLASSES,
    )  # fmt: skip


def written(tmp_path, **kwargs):
    tracer = StepTracer(tmp_path / "steps", classes=DEFAULT_CLASSES)
    record(tracer, **kwargs)
    [step] = read_steps(tmp_path / "steps").steps  # there before the tracer is closed
    tracer.close()
    return step


def test_line_tells_the_step(tmp_path):
    step = written(tmp_path, terms={"dense": 0.25, "head": 0.125})
    assert (step.step, step.started_s, step.measured_s, step.ended_s) == (3, 10.0, 0.25, 10.25)
    assert (step.predicted_s, step.predicted_ls_s, step.bound_s, step.bound_by) == (0.5, 0.3, 0.6, "tpot of b")
    assert (step.features, step.terms) == ({"seats": 4}, {"dense": 0.25, "head": 0.125})
    assert step.scheduled == {
        "LS": {
            "requests": 2,
            "tokens": 31,
            "prefill_tokens": 30,
            "entries": 0,
            "pipelined": 0,
            "moves": 0,
            "joins": {},
        },
        "BE": {
            "requests": 3,
            "tokens": 8,
            "prefill_tokens": 8,
            "entries": 1,
            "pipelined": 0,
            "moves": 1,
            "joins": {"2": 2, "4": 1},
        },
    }
    assert step.chunks == [["a", "LS", 0, 30], ["b", "LS", 9, 1], ["x", "BE", 8, 8]]
    assert (step.entries, step.joins) == (["y"], [["z", 2], ["z", 2], ["z", 4]])
    assert step.moves == [["x", "to_host", 2, True]]
    assert step.left_out == [["BE prefill", 2, "q", "time"]]
    assert step.outcomes == []
    assert step.is_whole


def test_step_of_rows_that_left_or_came_back_is_not_whole(tmp_path):
    back = StepPlan(step_id=0, chunks=(chunk("a", 2), dataclasses.replace(chunk("x", 2), from_layer=5)))
    step = written(tmp_path, plan=back)
    assert (step.halted, step.resumed, step.is_whole) == ({}, {"x": 5}, False)
    step = written(tmp_path, halted={"x": 3})
    assert (step.halted, step.resumed, step.is_whole) == ({"x": 3}, {}, False)


def test_policy_that_predicts_nothing(tmp_path):
    bare = StepPlan(step_id=0, chunks=(chunk("a", 2),))
    assert written(tmp_path, plan=bare).predicted_s is None
    assert written(tmp_path, plan=bare, terms={"dense": 0.25, "head": 0.125}).predicted_s == 0.375


def test_first_token_and_end_have_outcomes(tmp_path):
    times = RequestTimes(
        arrival_s=1.0, first_scheduled_s=1.5, first_token_s=3.0, finished_s=7.0, predicted_ttft_s=1.75
    )  # fmt: skip
    first = Outcome(
        request_id="a", service_class="LS", objective="ttft", seconds=2.0, limit_s=1.0, met=False, from_s=1.0,
        to_s=3.0, first_scheduled_s=1.5, predicted_s=1.75,
    )  # fmt: skip
    last = Outcome(
        request_id="x", service_class="BE", objective="tpot", seconds=0.5, limit_s=0.5, met=True, from_s=3.0,
        to_s=7.0, first_scheduled_s=1.5, predicted_s=None,
    )  # fmt: skip
    outputs = [
        output("a", times=times),
        output("x", num_output=9, reason=FinishReason.LENGTH, times=times),
        output("b", num_output=5, times=times),  # goes on
        output("y", num_output=5, reason=FinishReason.ABORT, times=times),
        output("z", num_new=0, num_output=0, reason=FinishReason.ERROR, times=RequestTimes(arrival_s=1.0)),
    ]
    slos = dict.fromkeys(CLASSES, SLO()) | {"a": SLO(ttft_s=1.0), "x": SLO(tpot_s=0.5)}
    assert written(tmp_path, outputs=outputs, slos=slos).outcomes == [first, last]


def test_prefixes_have_their_tokens_and_copies(tmp_path):
    times = RequestTimes(arrival_s=1.0, first_scheduled_s=1.5, first_token_s=3.0, finished_s=7.0)
    found = dataclasses.replace(output("a", times=times), num_cached_tokens=64)
    copies = tuple(
        DiskCopy(move_id=8 + is_out, to_disk=is_out, host_block_ids=(1, 2), slots=(0, 5), keys=(b"a", b"b"))
        for is_out in (True, False)
    )
    step = written(tmp_path, plan=dataclasses.replace(PLAN, work=copies), outputs=[found], slos={"a": SLO()})
    assert [outcome.cached_tokens for outcome in step.outcomes] == [64]
    assert [tuple(copy) for copy in step.disk_copies] == [("to_disk", 2), ("to_host", 2)]


def test_without_an_objective_nothing_is_met_or_missed(tmp_path):
    times = RequestTimes(arrival_s=1.0, first_scheduled_s=1.5, first_token_s=3.0, finished_s=3.0)
    only = output("a", reason=FinishReason.STOP, times=times)  # of one token: no time per output token
    [outcome] = written(tmp_path, outputs=[only], slos={"a": SLO()}).outcomes
    assert (outcome.objective, outcome.limit_s, outcome.met) == ("ttft", None, None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_ends_the_trace_with_one_error(caplog):
    with caplog.at_level(logging.ERROR):
        tracer = StepTracer("/dev/full", classes=DEFAULT_CLASSES)
        for _ in range(3):
            record(tracer)
        tracer.close()
    [error] = caplog.records
    assert "no more steps are traced: /dev/full cannot be written" in error.getMessage()


def test_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(OSError, match="missing"):
        StepTracer(tmp_path / "missing" / "steps", classes=DEFAULT_CLASSES)


def test_partial_last_line_is_left_out(tmp_path):
    path = tmp_path / "steps"
    tracer = StepTracer(path, classes=DEFAULT_CLASSES)
    for _ in range(2):
        record(tracer)
    tracer.close()
    whole = path.read_text()
    assert len(read_steps(path).steps) == 2
    for cut in (1, 30):
        path.write_text(whole[:-cut])
        assert len(read_steps(path).steps) == 1


@pytest.mark.parametrize(
    "content", ["", "hello\n", "{}\n", "[1]\n", '{"format": "omniserve steps 0", "classes": []}\n', "\x00\x01"]
)
def test_file_that_is_no_trace(tmp_path, content):
    path = tmp_path / "steps"
    path.write_text(content)
    with pytest.raises(ValueError, match="is no trace of steps; make one with --trace-steps"):
        read_steps(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="is no trace of steps"):
        read_steps(path)


@pytest.mark.parametrize("damage", ["{", json.dumps({"step": 3}), "7"])
def test_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "steps"
    tracer = StepTracer(path, classes=DEFAULT_CLASSES)
    record(tracer)
    tracer.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, damage, lines[-1], ""]))
    with pytest.raises(ValueError, match="line 3: this is no traced step"):
        read_steps(path)
