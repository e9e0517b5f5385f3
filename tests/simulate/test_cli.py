"""``python -m omniserve.simulate``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from omniserve.core.config import DEFAULT_CLASSES
from omniserve.core.plan import StepPlan
from omniserve.latency import BatchFeatures
from omniserve.latency.omniserve import OmniServeModel
from omniserve.latency.trace import StepTracer
from omniserve.simulate.cli import main
from tests.latency.samples import LAYERS, make_profile

ROOT = Path(__file__).parents[2]
QUICK = ["--model", "llama-2-13b", "--device", "A100-80GB", "--minutes", "0.1", "--be", "4", "--ls-lengths", "64:8"]


def test_a_table_a_plan_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "deep" / "record.json"
    arguments = [*QUICK, "--hosts", "2xXeon-6342", "--scheduler", "omniserve,sarathi", "--ls-rate", "1,2"]
    # Long prompts: few requests fill the device.
    arguments += ["--minutes", "0.2", "--ls-lengths", "1500:20", "--slo", "2:0.3"]
    assert main([*arguments, "--record", str(record)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-2-13b on 1xA100-80GB and 2 x Xeon-6342, 0.2 simulated minutes; TTFT 2.0 s")
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["omniserve", "1"], ["omniserve", "2"], ["sarathi", "1"], ["sarathi", "2"],
    ]  # fmt: skip
    assert "plan for omniserve" in text and "plan for sarathi" in text
    assert (
        text.count("highest LS rate: ") == text.count("one more CPU host: ") == text.count("P = 64 instead of 32") == 2
    )
    data = json.loads(record.read_text())
    assert data["simulated"] is True and data["config"]["be"] == "4"
    assert len(data["results"]) == 4 + 2 * 3
    first = data["results"][0]
    assert first["rate"] == 1.0 and first["result"]["classes"]["LS"]["attainment"] == 1.0
    assert len(first["result"]["requests"]) > 12


def test_stages_and_prefill_engines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*QUICK, "--minutes", "0.2", "--hosts", "Xeon-6342", "--no-plan", "--ls-lengths", "512:8"]
    assert main([*arguments, "--pipeline-parallel-size", "2"]) == 0
    assert capsys.readouterr().out.startswith("llama-2-13b on 2 stages of 1xA100-80GB and 1 x Xeon-6342, ")
    assert main([*arguments, "--prefill-engines", "2", "--prefill-placement", "always"]) == 0
    title, heads, row = capsys.readouterr().out.splitlines()[:3]
    assert title.startswith("llama-2-13b on 1xA100-80GB and 1 x Xeon-6342, 2 prefill engines, ")
    assert "LS elsewhere" in heads and "94%" in row  # 480 of 512 tokens


def test_several_engines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*QUICK, "--minutes", "0.2", "--no-plan", "--scheduler", "sarathi", "--engines", "2"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("llama-2-13b on 2 x 1xA100-80GB, ")
    with pytest.raises(SystemExit):
        main([*arguments[:-1], "0"])


def test_the_same_seed_gives_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    def run(seed: str) -> str:
        assert main([*QUICK, "--no-plan", "--ls-rate", "5", "--noise", "0.1", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert run("1") == run("1") != run("2")


def test_a_trace_and_best_effort_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,50,5\n1,60,6\n2,9000,7\n")
    arguments = ["--model", "llama-2-13b", "--device", "A100", "--minutes", "0.2", "--no-plan", "--trace", str(trace)]
    assert main([*arguments, "--be", "rate:1", "--be-lengths", "lognormal:30:5"]) == 0
    text = capsys.readouterr().out
    assert "omniserve   1.5" in text and "requests longer than the model's context" in text
    assert main([*arguments, "--be", str(trace)]) == 0


def test_a_machine_is_calibrated_from_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    make_profile().write(profile)
    path = tmp_path / "steps.jsonl"
    tracer = StepTracer(path, classes=DEFAULT_CLASSES)
    model = OmniServeModel.from_profile(make_profile())
    for count in range(1, 101):
        features = BatchFeatures(decode_requests=count, decode_load=100.0 * count, dense_layers=model.num_layers)
        tracer.record(
            StepPlan(step_id=count), started_s=0.0, seconds=2 * model.step_s(features), halted={}, outputs=[], terms={},
            features=dataclasses.asdict(features), slos={}, classes={},
        )  # fmt: skip
    tracer.close()
    sizes = {
        "num_hidden_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 2048, "model_type": "llama",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    arguments = ["--model", str(tmp_path), "--profile", str(profile), "--device-kv-gb", "0.01", "--be", "0"]
    arguments += ["--minutes", "0.2", "--ls-lengths", "50:9", "--no-plan", "--slo", "60:60"]

    def tpot_ms(*more: str) -> float:
        assert main([*arguments, *more]) == 0
        text = capsys.readouterr().out
        assert ("100 steps took 2.00 times what was predicted; then 9 of 10 are 1.00 to 1.00" in text) == bool(more)
        return float(text.splitlines()[-1].split()[7])

    assert tpot_ms("--calibrate-from", str(path)) == pytest.approx(2 * tpot_ms(), rel=0.02, abs=0.2)
    assert main([*arguments, "--calibrate-from", str(profile)]) == 2
    assert "is no trace of steps" in capsys.readouterr().err


def test_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert main([*QUICK, "--no-plan", "--ls-rate", "1,2", "--plot", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*QUICK, "--plot", "x.png"]) == 2
    assert "pip install 'omniserve[bench]'" in capsys.readouterr().err


def test_objectives_that_cannot_be_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--slo", "0.001:0.001", "--ls-rate", "1"]) == 0
    text = capsys.readouterr().out
    assert "highest LS rate: 0 requests/s" in text and "cannot be met at any rate" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-9", "--device", "A100"], "unknown model 'gpt-9'; known: llama-2-7b"),
        (["--model", "llama-2-7b"], "give --device"),
        (["--model", "llama-2-7b", "--device", "Z80"], "unknown device"),
        (["--model", "llama-2-7b", "--device", "A100", "--hosts", "Z80"], "unknown host"),
        (["--model", "llama-2-70b", "--device", "A100"], "take more devices"),
        ([*QUICK, "--scheduler", "nobody"], "unknown scheduler 'nobody'"),
        ([*QUICK, "--be", "many"], "--be must be a number"),
        ([*QUICK, "--arrivals", "never"], "arrivals must be"),
        ([*QUICK, "--trace", "x.csv"], "--trace has its own lengths"),
        ([*QUICK, "--profile", "x.json"], "without --device"),
        (["--model", "llama-2-7b", "--profile", "nowhere.json"], "nowhere.json"),
        ([*QUICK, "--prefill-engines", "1"], "give hosts, too"),
        ([*QUICK, "--hosts", "Xeon-6342", "--prefill-engines", "1", "--prefill-placement", "x"], "unknown placement"),
        ([*QUICK, "--pipeline-parallel-size", "99"], "99 stages cannot be made"),
        ([*QUICK, "--pipeline-parallel-size", "2", "--scheduler", "neo"], "not for scheduler='neo'"),
        ([*QUICK, "--step-tokens", "0"], "max_num_batched_tokens must be >= 1"),
    ],
)
def test_bad_input_is_said_and_ends_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [("--ls-rate", "1,x", "must be a number, got 'x'"), ("--slo", "1", "must be a number, got ''"),
     ("--minutes", "0", "must be a number > 0"), ("--target", "2", "share in"), ("--target", "0", "share in"),
     ("--prefill-engines", "-1", "whole number >= 0"), ("--pipeline-parallel-size", "0", "whole number >= 1"),
     ("--warm-up", "1", "share in")],
)  # fmt: skip
def test_bad_flags_are_refused_by_the_parser(
    flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*QUICK, flag, value])
    assert said in capsys.readouterr().err


def test_a_profile_that_does_not_fit_the_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    make_profile().write(path)
    assert main(["--model", "smollm-135m", "--profile", str(path), "--device-kv-gb", "1"]) == 2
    assert "4 layers" in capsys.readouterr().err


def test_no_torch_is_loaded() -> None:
    code = f"""
import sys
from omniserve.simulate.cli import main
status = main({[*QUICK, "--no-plan"]!r})
print(status, sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
