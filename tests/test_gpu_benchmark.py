"""The GPU benchmarks: every part runs dry, tables say what was measured, and a part that hangs costs only itself."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.record import ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.bench import Bench, Measured, NotHere
from benchmarks.gpu.engines import config_of, drain, kv_token_bytes, open_engine, request, step_times, weight_bytes
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.models import LLAMA_8B, QWEN_32B, TINY, ModelShelf, random_model
from benchmarks.gpu.outcome_log import VARIABLE
from benchmarks.gpu.parts import PARTS, exactness, limit_of
from benchmarks.gpu.parts.exactness import summary
from benchmarks.gpu.parts.transformers_beside import token_s
from benchmarks.gpu.primed import PRIMED
from benchmarks.gpu.program import Program
from benchmarks.gpu.supervise import Supervisor
from benchmarks.gpu.table import Goal, Row, markdown, row_of
from benchmarks.gpu.trace import covered, spans_on
from benchmarks.gpu.worker import PartRunner
from omniserve.patching import patch
from tests.host.helpers import wait_until

CPU = torch.device("cpu")
MEASURED = {
    "exactness": {"tests, failed": "tests", "every kernel once: status": ""},
    "decode": {"tiny, batch 4, 40 tokens": "ms", "tiny, batch 1, 40 tokens": "ms"},
    "attention": {"cpu, 4 decodes at 40 tokens: a layer": "us", "sdpa, 1 chunks of 32 at 40 tokens: a layer": "us"},
    "prefill": {"tiny, prompt of 64 tokens": "TFLOP/s", "tiny, prompt of 64 tokens in steps of 32": "TFLOP/s"},
    "piggyback": {
        "operators of 1 seats beside 4 rows, a layer": "us",
        "step of 4 LS rows, 8 BE requests on the host": "ms",
        "2 residents: a layer longer than with no seat": "us",
    },
    "moves": {
        "4 blocks (0 MiB) to host, alone": "GB/s",
        "1 blocks (0 MiB) to device, beside steps of 2 rows": "GB/s",
        "step of 2 rows beside moves to device": "ms",
    },
    "host": {
        "TPOT of 2 LS requests, 4 BE requests on the host": "ms",
        "BE tokens of 4 requests on the host, no LS, 1 s": "tokens/s",
    },
    "coserving": {
        "omniserve, 8 LS/s: LS requests that met their objectives": "of all",
        "fcfs, 16 LS/s: BE prompt and output tokens beside LS": "tokens/s",
    },
    "safepoints": {
        "step of 2 BE rows that looks who has come": "ms",
        "step of 2 BE rows that looks who has come, over steps that nobody may leave": "ms",
        "from a signal to the end of a step of 64 BE rows": "ms",
    },
    "qwen": {"tiny, batch 4, 40 tokens": "ms", "tiny, prompt of 32 tokens": "TFLOP/s"},
    "transformers": {"transformers, batch 2, 40 tokens: generate, static cache, compiled": "ms"},
}
"""What each part has measured, at least, when it ran dry on a CPU. ``floors`` runs in a worker of its own, below."""


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def runner(events: list[dict[str, Any]]) -> PartRunner:
    return PartRunner(CPU, dry=True, send=events.append)


@pytest.mark.parametrize("part", MEASURED)
def test_part_runs_dry(part: str, runner: PartRunner, events: list[dict[str, Any]]) -> None:
    assert runner.run(part, 120.0)
    begin, *middle, end = [event for event in events if event["part"] == part]
    assert (begin["event"], end["event"], end["status"]) == ("begin", "end", "measured"), end
    rows = {row.case: row for row in (row_of(json.loads(json.dumps(event))["row"]) for event in middle)}
    assert len(rows) == len(middle), "two rows of one name"
    for row in rows.values():
        assert not row.note.startswith("FAILED"), row
        assert (row.measured is None) == row.note.startswith("not measured"), row
        for value in (row.measured, row.floor, row.ratio):
            assert value is None or math.isfinite(value), row
        assert row.floor is None or row.floor > 0, row
    for case, unit in MEASURED[part].items():
        row = rows[case]
        assert row.unit == unit and row.measured is not None, row
        # A difference of two steps may be below 0; nothing else may, and only counts of faults should be 0.
        assert row.measured > 0 or "longer than" in case or row.unit in ("tests", ""), row


def test_every_test_marked_gpu_is_run_there(request: pytest.FixtureRequest) -> None:
    assert all((ROOT / path).exists() for path in (*exactness.SUITE, *exactness.DRY_SUITE))
    marked = {item.path.relative_to(ROOT) for item in request.session.items if item.get_closest_marker("gpu")}
    assert not {path for path in marked if path.parts[1] not in {Path(folder).name for folder in exactness.SUITE}}


def test_the_host_tier_works_in_the_parts_that_are_about_it(runner: PartRunner, events: list[dict[str, Any]]) -> None:
    runner.run("host", 60.0)
    details = [event["row"]["details"] for event in events if event["part"] == "host" and event["event"] == "row"]
    sustained = details[-1]
    assert sustained["host_output_tokens"] > 0 and sustained["host_kv_bytes_read"] > 0
    assert sustained["piggyback_rows"] > sustained["host_output_tokens"]


def test_command_leaves_a_record_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    assert command.main(["--dry", "--only", "floors", "--minutes", "2", "--record", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["benchmark"] == "gpu" and record["config"]["parts"] == ["floors"] and record["config"]["dry"]
    assert {"cpu", "gpus", "memory_bytes"} <= record["environment"]["hardware"].keys()
    assert {"torch", "transformers"} <= record["environment"]["versions"].keys()
    floors = record["results"]["floors"]
    assert floors["status"] == "measured" and 0 < floors["seconds"] < floors["limit_s"]
    assert [row["unit"] for row in floors["rows"]] == ["GB/s", "TFLOP/s", "GB/s", "GB/s", "us", "us", "GB/s"]
    assert all(row["measured"] > 0 for row in floors["rows"])
    shown = capsys.readouterr().out
    assert "## floors" in shown and "| bf16 matrix product" in shown and f"record: {path}" in shown


def test_command_line_refuses_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--only", "floor"], "there is no part floor"), (["--minutes", "0"], "--minutes must")):
        with pytest.raises(SystemExit):
            command.parse_arguments(arguments)
        assert message in capsys.readouterr().err


def test_record_goes_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert command.parse_arguments([]).record.parts[-3:] == ("results", "gpu", "gpu.json")
    assert ".cache" in command.parse_arguments(["--dry"]).record.parts
    monkeypatch.setenv("OUT", "/somewhere")
    assert command.parse_arguments(["--only", "host,moves"]).record == Path("/somewhere/gpu_host_moves.json")


# -- tables ---------------------------------------------------------------------------------------------------------


def test_goal_is_of_the_ratio_or_of_the_value() -> None:
    assert Row(case="", unit="", measured=1.2, floor=1.0, goal=Goal(at_most=1.25)).met is True
    assert Row(case="", unit="", measured=1.3, floor=1.0, goal=Goal(at_most=1.25)).met is False
    assert Row(case="", unit="", measured=70, floor=100, goal=Goal(at_least=0.8)).met is False
    assert Row(case="", unit="", measured=0, goal=Goal(at_most=0, of="measured")).met is True
    assert Row(case="", unit="", measured=1, goal=Goal(at_least=2, of="measured")).met is False
    assert Row(case="", unit="", floor=1.0, goal=Goal(at_most=1)).met is None
    with pytest.raises(ValueError, match="one of the two"):
        Goal(at_most=1, at_least=2)


def test_table_says_what_was_missed_and_what_was_not_measured() -> None:
    rows = [
        Row(case="slow", unit="ms", measured=3.0, floor=2.0, goal=Goal(at_most=1.25)),
        Row(case="none", unit="ms", note="not measured: a | b"),
    ]
    lines = markdown([row_of(row.as_record()) for row in rows]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "slow",
        "3 ms",
        "2 ms",
        "1.5",
        "<= 1.25 x",
        "NO",
        "",
    ]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]][1::5] == ["not measured", "not measured: a / b"][
        :2
    ] or ("not measured: a / b" in lines[3])
    assert len({len(line) for line in lines}) == 1


def test_what_the_profiler_saw_is_found_by_the_kind_of_device() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.ones(1000).sum()
    spans = spans_on(DeviceType.CPU, trace)
    assert spans and all(start <= end for start, end in spans)
    assert not spans_on(DeviceType.CUDA, trace)


def test_gaps_between_tokens_count_while_all_requests_decode() -> None:
    def output(stamps: list[float]) -> SimpleNamespace:
        return SimpleNamespace(timestamps=stamps, generated_tokens=list(range(len(stamps))))

    early = output([0.0, *(10.0 + 2.0 * i for i in range(31))])  # waits for the other's prompt at first
    late = output([11.0 + 2.0 * i for i in range(32)])
    assert token_s([early, late], 2) == 2.0
    with pytest.raises(RuntimeError, match="1 of 2 requests did not get their 32 tokens"):
        token_s([late, output([1.0, 2.0])], 2)


def test_covered_time_counts_overlaps_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6


def test_a_case_that_fails_costs_only_itself() -> None:
    rows: list[Row] = []

    def bench(limit_s: float) -> Bench:
        shelf = ModelShelf(CPU, dry=True)
        limits = Limits(CPU, dry=True)
        return Bench(device=CPU, dry=True, limits=limits, shelf=shelf, limit_s=limit_s, emit=rows.append)

    def refuse() -> float:
        raise NotHere("no such thing")

    def fail() -> float:
        raise RuntimeError("broken\nmore of it")

    assert bench(60).take("number", "s", lambda: 2.0, floor=1.0) == 2.0
    assert bench(60).take("more", "s", lambda: Measured(value=2.0, floor=4.0, note="n"), floor=1.0) == 2.0
    assert bench(60).take("not here", "s", refuse) is None
    assert bench(60).take("fails", "s", fail) is None
    assert bench(60).take("too late", "s", lambda: 1.0, needs_s=61) is None
    assert bench(-1).take("over", "s", lambda: 1.0) is None
    assert [row.ratio for row in rows] == [2.0, 0.5, None, None, None, None]
    assert [row.note for row in rows] == [
        "", "n", "not measured: no such thing", "FAILED: RuntimeError: broken", "not measured: out of time",
        "not measured: out of time",
    ]  # fmt: skip


# -- time, and what goes wrong --------------------------------------------------------------------------------------


def test_time_is_shared_among_what_is_left() -> None:
    names = list(PARTS)
    left_s, limits = 500.0, []
    for name in names:
        limits.append(limit_of(name, names, left_s))
        left_s -= limits[-1]
    assert left_s == pytest.approx(0, abs=1e-6) and min(limits) > 10
    assert limit_of("host", ["floors", "host"], 100.0) == 100.0  # what others did not use is there for the last


STUB = """
import json, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
names = arguments["--parts"].split(",")
with open(arguments["--events"], "a", buffering=1) as events:
    for name in names:
        if name == "exactness":
            sys.exit(5)
        print(json.dumps({"event": "begin", "part": name, "limit_s": 0.5}), file=events)
        row = {"case": name, "unit": "s", "measured": 1.0, "floor": None, "goal": None, "note": "", "details": {}}
        print(json.dumps({"event": "row", "part": name, "row": row}), file=events)
        if name == "decode":
            time.sleep(600)
        if name == "prefill":
            sys.exit(4)
        print(json.dumps({"event": "end", "part": name, "status": "measured", "seconds": 0.1}), file=events)
        if name == "moves":
            sys.exit(3)
"""


def supervised(names: list[str], tmp_path: Path) -> Supervisor:
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    ended: list[str] = []
    supervisor = Supervisor(
        names, ends_at_s=time.time() + 60, dry=False, grace_s=0.5, on_end=ended.append,
        worker=(sys.executable, str(stub)),
    )  # fmt: skip
    supervisor.run()
    assert sorted(ended) == sorted(name for name, outcome in supervisor.outcomes.items() if outcome.rows)
    return supervisor


def test_parts_that_hang_or_break_are_cut_and_the_others_run(tmp_path: Path) -> None:
    names = ["floors", "decode", "prefill", "moves", "host"]
    outcomes = supervised(names, tmp_path).outcomes
    assert {name: outcomes[name].status for name in names} == {
        "floors": "measured", "decode": "cut after its 0 s", "prefill": "failed: the worker ended with status 4",
        "moves": "measured", "host": "measured",
    }  # fmt: skip
    assert [outcomes[name].failed for name in names] == [False, False, True, False, False]
    assert all([row.case for row in outcome.rows] == [name] for name, outcome in outcomes.items())


def test_a_worker_that_cannot_begin_is_not_started_again(tmp_path: Path) -> None:
    outcomes = supervised(["exactness", "host"], tmp_path).outcomes
    assert outcomes["exactness"].failed and "before it began" in outcomes["exactness"].status
    assert outcomes["host"].status == "not measured" and not outcomes["host"].failed


def test_a_program_is_cut_after_its_time(tmp_path: Path) -> None:
    code = f"import time; print('seen', flush=True); open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(60)"
    with Program([sys.executable, "-c", code]) as program:
        wait_until((tmp_path / "ready").exists)
        status, output, was_cut = program.wait(1)
    assert was_cut and status != 0 and "seen" in output
    with Program([sys.executable, "-c", "raise SystemExit(3)"]) as program:
        assert program.wait(60)[::2] == (3, False)


def test_a_program_ends_with_those_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{child.pid}} ')\n"
        "time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt), Program([sys.executable, "-c", code]):
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(" "))
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
        raise KeyboardInterrupt
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it is gone, perhaps just now
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_summary_of_tests_names_those_that_failed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = [("a", "passed"), ("b", "failed"), ("c", "skipped"), ("d", "passed"), ("d", "failed"), ("b", "passed")]
    log.write_text("".join(json.dumps({"test": test, "outcome": outcome}) + "\n" for test, outcome in outcomes))
    counted = summary(log, was_cut=True)
    assert counted.value == 2 and counted.details["failed"] == ["b", "d"]
    assert counted.note == "1 passed, 2 failed, 1 skipped, cut: out of time"
    log.write_text(json.dumps({"test": "a", "outcome": "passed"}) + "\n")
    assert summary(log, was_cut=False).value == 0
    with pytest.raises(NotHere, match="1 passed, 0 failed, 0 skipped, cut: out of time"):
        summary(log, was_cut=True)  # the others might have failed
    log.write_text("")
    with pytest.raises(NotHere, match="no test ran"):
        summary(log, was_cut=False)


def test_outcomes_are_written_as_they_come(tmp_path: Path) -> None:
    tests, log = tmp_path / "test_some.py", tmp_path / "log"
    tests.write_text(
        "import os, pytest\ndef test_good(): pass\ndef test_bad(): assert False\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_unready(broken): pass\n"
        "@pytest.mark.skip\ndef test_left_out(): pass\ndef test_fatal(): os._exit(9)\n"
    )
    (tmp_path / "test_unreadable.py").write_text("import no_such_module")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "/dev/null",
        "-p",
        "benchmarks.gpu.outcome_log",
        str(tmp_path),
    ]
    with Program([*command, "--continue-on-collection-errors"], os.environ | {VARIABLE: str(log)}) as program:
        status, output, was_cut = program.wait(60)
    assert status == 9 and not was_cut, output
    counted = summary(log, was_cut=was_cut)
    assert counted.note == "1 passed, 3 failed, 1 skipped"
    names = [name.rsplit("/")[-1] for name in counted.details["failed"]]
    assert sorted(names) == ["test_some.py::test_bad", "test_some.py::test_unready", "test_unreadable.py"]


# -- models and engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "billions"), [(LLAMA_8B, 8.03), (QWEN_32B, 32.76)])
def test_shapes_are_those_of_the_models(shape: Any, billions: float) -> None:
    model = random_model(shape, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.001)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert weight_bytes(model) == 2 * (
        sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    )


def test_primed_requests_decode_at_once_where_they_should() -> None:
    model = patch(random_model(TINY, CPU), compile=False)
    spec = model.omniserve.spec
    config = config_of(
        model, scheduler=PRIMED, device_kv_bytes=6 * spec.kv_block_bytes(64), host_kv_bytes=4 * spec.kv_block_bytes(64),
        max_host_requests=2, swap_in_delay_s=1e9,
    )  # fmt: skip
    assert kv_token_bytes(spec) * 64 == spec.kv_block_bytes(64)
    with open_engine(model, config) as engine:
        names = ["ls0", "be0", "be1"]
        for name in names:
            engine.add(request(name, 70, 8, spec.vocab_size))
            engine.scheduler.check_integrity()  # type: ignore[attr-defined]
        (output,) = engine.step()
        assert output.request_id == "ls0" and len(output.new_token_ids) == 1  # no prefill
        with pytest.raises(ValueError, match="no slot"):
            engine.add(request("be2", 10, 8, spec.vocab_size))
        engine.abort("ls0")
        deadline_s = time.monotonic() + 30
        while engine.stats().host_output_tokens < 2 and time.monotonic() < deadline_s:
            engine.step()
            engine.wait(0.01)
        assert engine.stats().host_output_tokens >= 2
        drain(engine, names)
        engine.scheduler.check_integrity()  # type: ignore[attr-defined]
        engine.add(request("ls1", 70, 4, spec.vocab_size))
        with pytest.raises(RuntimeError, match="a request ended"):
            step_times(engine, 10, warm_up=1)
