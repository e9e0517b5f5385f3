"""The GPU scripts: each runs dry and leaves its record, and one that hangs or breaks costs only itself."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common.engine_run import request
from benchmarks.common.record import ROOT, read_row, write_rows
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import check_machine, check_steps, check_tests
from benchmarks.gpu import script as script_module
from benchmarks.gpu.__main__ import NO_GPU
from benchmarks.gpu.engines import (
    LLAMA_8B,
    QWEN_32B,
    TINY,
    add_decoding,
    config_of,
    drain,
    kv_token_bytes,
    open_engine,
    random_model,
    renew,
    step_ms,
    weight_bytes,
)
from benchmarks.gpu.script import NotHere, Script, run_program, short
from omniserve.layers.patching import patch
from tests.host.helpers import wait_until
from tests.parity.engine_histories import Reference
from tests.parity.models import tiny_model

CPU = torch.device("cpu")
FIGURES = {
    "limits": {"bf16 matrix product": "TFLOP/s", "small kernel, in a CUDA graph": "us"},
    "llama": {
        "tiny, batch 4, 40 tokens": "ms", "tiny, batch 1, 40 tokens, no step graphs": "ms",
        "tiny, prompt of 64 tokens": "TFLOP/s", "tiny, prompt of 64 tokens in steps of 32": "TFLOP/s",
    },
    "qwen": {"tiny, batch 4, 40 tokens": "ms", "tiny, prompt of 32 tokens": "TFLOP/s"},
    "attention": {"cpu, 4 decodes at 40 tokens: a layer": "us", "sdpa, 1 chunks of 32 at 40 tokens: a layer": "us"},
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
    "safepoints": {
        "step of 4 BE rows that looks for requests": "ms",
    },
    "host": {
        "TPOT of 2 LS requests, 4 BE requests on the host": "ms",
        "BE tokens of 4 requests on the host, no LS, 1 s": "tokens/s",
    },
    "policies": {
        "omniserve, 8 LS/s: LS requests that met their objectives": "of all",
        "fcfs, 8 LS/s: LS requests that met their objectives": "of all",
    },
    "transformers": {"transformers, batch 2, 40 tokens: generate, static cache, compiled": "ms"},
}  # fmt: skip
"""Figures that a dry run on a CPU measures at least, part by part."""
CHECKS = {
    "machine": "the extension loads",
    "steps": "no hidden wait: all captured shapes, steps that overlap",
    "exactness": "random histories",
    "marked_tests": "tests marked gpu, in 1 files",
}
"""A case of each check that must have passed."""
QUICK = ("machine", "sanitizer", "limits", "moves", "host")


def run_part(name: str, out: Path) -> dict[str, dict[str, Any]]:
    """Run a part dry in this process and return its cases by name."""
    assert command.main(["--here", f"{command.PARTS[name][-1]}:{name}", "--dry", "--out", str(out)]) == 0
    (path,) = out.iterdir()
    assert path.name == f"gpu_{name}.json"
    record = read_row(path)
    assert record["config"]["dry"]
    cases = record["results"]["cases"]
    assert len({case["case"] for case in cases}) == len(cases), "two cases of one name"
    for case in cases:
        assert case["outcome"] in ("PASS", "SKIP") and (case["outcome"] == "PASS" or case["note"]), case
        for value in (case["measured"], case["limit"], case["ratio"]):
            assert value is None or math.isfinite(value), case
    return {case["case"]: case for case in cases}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in command.PARTS]
)
def test_part_runs_dry_and_records_what_it_is_about(name: str, tmp_path: Path) -> None:
    cases = run_part(name, tmp_path)
    for case, unit in FIGURES.get(name, {}).items():
        assert cases[case]["outcome"] == "PASS" and cases[case]["unit"] == unit, cases[case]
        # A difference of two steps may be below 0; nothing else may.
        assert cases[case]["measured"] > 0 or "longer than" in case, cases[case]
    if name in CHECKS:
        assert cases[CHECKS[name]]["outcome"] == "PASS", cases
    assert name in FIGURES or name in CHECKS or name == "sanitizer"  # which needs a GPU


@pytest.mark.exhaustive
def test_command_runs_everything_dry(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    parts = read_row(tmp_path / "gpu.json")["results"]["parts"]
    assert list(parts) == list(command.PARTS) and {part["status"] for part in parts.values()} == {"ok"}
    assert len(list(tmp_path.glob("gpu_*.json"))) == len(command.PARTS)


def stub_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **codes: str) -> None:
    """Let parts be functions with this code, in modules that a child finds, too."""
    (tmp_path / "stubs").mkdir()
    for name, code in codes.items():
        (tmp_path / "stubs" / f"stub_{name}.py").write_text(f"def {name}(script):\n    {code or 'pass'}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stubs"))
    stubs = {name: ("check", 30 if name == "hangs" else 60, f"stub_{name}") for name in codes}
    monkeypatch.setattr(command, "PARTS", stubs)
    monkeypatch.setattr(command, "RUNNER", ("stub_runner",))  # which does not import torch
    run = "import importlib, sys\nmodule, _, part = sys.argv[1].partition(':')\n"
    run += "getattr(importlib.import_module(module), part)(None)"
    (tmp_path / "stubs" / "stub_runner.py").write_text(run)
    monkeypatch.setattr(command, "_DRY_PATIENCE", 0.05)  # 3 s, and of the part that hangs half of that
    monkeypatch.setattr(command, "_LEAST_S", 0.0)


def test_parts_that_hang_or_break_are_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stub_parts(
        monkeypatch, tmp_path, hangs="import time; print('seen', flush=True); time.sleep(60)",
        crashes="import os; os.abort()", fails="raise SystemExit(1)", works="print('fine')",
    )  # fmt: skip
    assert command.main(["--dry", "--only", "check", "--out", str(tmp_path / "out")]) == 1
    parts = read_row(tmp_path / "out" / "gpu.json")["results"]["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "hangs": "cut", "crashes": "ended with status -6", "fails": "failed: see its cases", "works": "ok",
    }  # fmt: skip
    said = "\n".join(parts["hangs"]["end_of_output"])
    assert "seen" in said and "in hangs" in said, "where it hung"
    assert str(tmp_path) not in json.dumps(parts), "no path of this machine"
    shown = capfd.readouterr().out
    assert "NOT OK: hangs (cut), crashes" in shown and "in hangs" in shown
    assert "in hangs" in (tmp_path / "out" / "report.md").read_text()


def test_no_gpu_ends_the_run_and_calls_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_parts(monkeypatch, tmp_path, first="", machine=f"raise SystemExit({NO_GPU})", never="", late="")
    out = tmp_path / "out"
    arguments = ["--dry", "--out", str(out)]
    out.mkdir()
    (out / "gpu_first.json").write_text("what an earlier run said")
    assert command.main([*arguments, "--only", "first,machine,never"]) == 1
    assert not (out / "gpu_first.json").exists()
    monkeypatch.setattr(command, "_LEAST_S", 10.0)
    assert command.main([*arguments, "--only", "late", "--minutes", "0.01"]) == 1
    parts = read_row(out / "gpu.json")["results"]["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "first": "ok", "machine": "there is no GPU", "late": "not run: out of time",
    }  # fmt: skip


def test_a_group_fits_ten_minutes() -> None:
    for group in ("check", "speed-1", "speed-2"):
        only = command.parse_arguments(["--only", group]).only
        assert only and sum(command.PARTS[name][1] for name in only) <= 590
    assert command.parse_arguments([]).only == list(command.PARTS)
    assert command.parse_arguments(["--only", "moves,speed-2,llama"]).only == ["llama", "moves", "host", "policies",
                                                                               "qwen", "transformers"]  # fmt: skip
    with pytest.raises(SystemExit):
        command.parse_arguments(["--only", "floor"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_only_a_dry_run_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--here", "speed_moves:moves", "--out", str(tmp_path)]) == NO_GPU
    assert "--dry" in capsys.readouterr().err and not list(tmp_path.iterdir())


# -- what scripts share ---------------------------------------------------------------------------------------------


def test_a_case_that_fails_is_recorded_without_paths_and_the_script_goes_on(tmp_path: Path) -> None:
    script = Script("cases", dry=True, out=tmp_path)
    with script.case("fails"):
        raise RuntimeError("broken in /home/somebody/model.bin\nmore of it")
    with script.case("not here"):
        raise NotHere("no such thing")
    with script.case("figure") as case:
        case.figure(3.0, "ms", limit=2.0, at_most=1.25)
    with script.case("rate") as case:
        case.figure(70.0, "GB/s", at_least=60.0)
    text = (tmp_path / "gpu_cases.json").read_text()
    failed, missing, figure, rate = read_row(tmp_path / "gpu_cases.json")["results"]["cases"]
    assert failed["outcome"] == "FAIL" and failed["note"].startswith("RuntimeError: broken in .../model.bin")
    assert "test_gpu.py" in "".join(failed["details"]["traceback"])
    assert "somebody" not in text and str(ROOT) not in text and str(tmp_path) not in text
    assert (missing["outcome"], missing["note"]) == ("SKIP", "no such thing")
    assert (figure["ratio"], figure["goal"], figure["met"]) == (1.5, "<= 1.25", False)
    assert (rate["ratio"], rate["goal"], rate["met"]) == (None, ">= 60", True)


def test_report_puts_steps_beside_the_forecast(tmp_path: Path) -> None:
    """The forecast is the one that is recorded: a report must be able to read it."""
    script = Script("steps_llama", dry=True, out=tmp_path)
    step = {"kind": "decode", "batch": 8, "context": 1024}
    for name, context in (("a step", 1024), ("another", 1025)):
        with script.case(name) as case:
            case.figure(7.0, "ms", model="Llama-3.1-8B", step=step | {"context": context}, step_ms=7.0)
    with script.case("broken"):
        raise RuntimeError("why")
    record = read_row(tmp_path / "gpu_steps_llama.json")
    record["environment"]["hardware"]["gpus"] = ["NVIDIA H200"]
    write_rows(tmp_path / "gpu_steps_llama.json", "gpu_steps_llama", [record])
    steps = read_row(command.FORECAST)["results"]["Llama-3.1-8B"]["steps"]
    (devices,) = [entry["devices"] for entry in steps if entry["step"] == step | {"seats": 0}]
    times = {name: 1e3 * seconds for name, seconds in devices["H200-141GB"].items()}
    command.write_report(tmp_path)
    lines = (tmp_path / "report.md").read_text().splitlines()
    beside = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines[lines.index("## Beside the forecast") :]
    ]
    figures = map(short, (7.0, times["expected_s"], 7.0 / times["expected_s"], times["floor_s"]))
    assert [row for row in beside if row][2:] == [["a step", *figures, "H200-141GB"]]
    assert "### FAIL: broken" in lines and "DRY" in "".join(lines)


def test_a_program_is_ended_with_those_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "GRACE_S", 0.2)
    code = f"trap '' ABRT; sleep 60 & echo $! > {tmp_path / 'pid'}; echo seen; wait; sleep 60"
    status, lines = run_program(["sh", "-c", code], limit_s=1)
    assert status is None and lines[0] == "seen"
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))
    assert run_program([sys.executable, "-c", "raise SystemExit(3)"], limit_s=60) == (3, [])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


# -- checks that can fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_step_check_compares_tokens(is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script("waits", dry=True, out=tmp_path)
    model: Any = tiny_model("llama")
    reference = Reference(model, num_prompts=2, max_tokens=4)
    monkeypatch.setattr(check_steps, "SAMPLINGS", ())
    if is_wrong:
        reference.tokens[1] = (*reference.tokens[1][:-1], 0)
    with (
        check_steps.open_tiny(patch(model, compile=False), step_graphs="off") as engine,
        pytest.raises(AssertionError, match=r"prompts \[1\] of 2") if is_wrong else contextlib.nullcontext(),
    ):
        check_steps.no_hidden_wait(engine, reference, script)


def test_what_is_unsupported_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90a", "compute_120"])
    script: Any = SimpleNamespace(on_gpu=True)
    found = {}
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        found[capability] = check_machine.unsupported(script)
    assert [len(found[capability]) for capability in found] == [2, 0, 0, 0, 1, 0], found
    assert "7.5 is below 8.0" in found[7, 5][0] and "no code for sm_100" in found[10, 0][0]


@pytest.mark.parametrize(
    ("says", "outcome"),
    [
        ("echo ERROR SUMMARY: 0 errors", "PASS"),
        ("echo ERROR SUMMARY: 2 errors; exit 86", "FAIL"),
        ("echo tests/a.py::one FAILED; sleep 30", "FAIL"),
        ("echo Device not supported; exit 1", "SKIP"),
        ("sleep 30", "SKIP"),
    ],
)
def test_a_programs_word_is_taken(says: str, outcome: str, tmp_path: Path) -> None:
    script = Script("tests", dry=True, out=tmp_path)
    check_tests.run_tests(script, "it", ["sh", "-c", says], 0.5 if "sleep" in says else 20.0)
    assert script.cases[0].outcome == outcome, script.cases


def test_every_test_marked_gpu_is_run_there(request: pytest.FixtureRequest) -> None:
    marked = {item.path.relative_to(ROOT) for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= set(check_tests.marked_files()) and check_tests.marked_files()


# -- models, engines and time ---------------------------------------------------------------------------------------


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
        model, device_kv_bytes=6 * spec.kv_block_bytes(64), host_kv_bytes=4 * spec.kv_block_bytes(64),
        max_host_requests=2, scheduler_options={"swap_in_delay_s": 1e9},
    )  # fmt: skip
    assert kv_token_bytes(model) * 64 == spec.kv_block_bytes(64)
    with open_engine(model, config) as engine:
        for name in (names := ["ls0", "be0", "be1"]):
            add_decoding(engine, request(name, 70, 8))
            engine.scheduler.check_integrity()
        (output,) = engine.step()
        assert output.request_id == "ls0" and len(output.new_token_ids) == 1  # no prefill
        with pytest.raises(ValueError, match="no slot"):
            add_decoding(engine, request("be2", 10, 8))
        engine.abort("ls0")
        deadline_s = time.monotonic() + 30
        while engine.stats().scheduler.host_output_tokens < 2 and time.monotonic() < deadline_s:
            engine.step()
            engine.wait(0.01)
        assert engine.stats().scheduler.host_output_tokens >= 2
        drain(engine, names)
        engine.scheduler.check_integrity()
        renew(engine, 1, 70, 4)
        with pytest.raises(RuntimeError, match="a request ended"):
            step_ms(engine, 10, warm_up=1)
