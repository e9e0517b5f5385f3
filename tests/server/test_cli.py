"""Flags become an EngineConfig; a wrong one ends with status 2 and a message."""

from __future__ import annotations

import pickle
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from omniserve.core.config import EngineConfig
from omniserve.core.request import SLO, ClassSpec
from omniserve.kv import KV_MANAGERS
from omniserve.latency import LATENCY_MODELS
from omniserve.launch import profile_cli
from omniserve.ops.attention import DEVICE_ATTENTION
from omniserve.sched import SCHEDULERS
from omniserve.server import cli, settings_parser
from omniserve.server.cli import parse_args
from tests.quick import slow_except


def parse(*arguments):
    return parse_args(["--model", "some/model", *arguments])


def test_defaults_are_those_of_engine_config():
    options, loader = parse()
    assert loader.config == EngineConfig()
    assert (options.host, options.port, options.model_names) == ("127.0.0.1", 8000, ("some/model",))
    assert (loader.model, loader.dtype, loader.device) == ("some/model", "auto", "auto")
    assert (loader.profile, loader.with_profile) == (None, True)


@pytest.mark.parametrize("program", [cli, profile_cli], ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    ("flag", "registry"),
    [
        ("--scheduler", SCHEDULERS),
        ("--kv", KV_MANAGERS),
        ("--execution", DEVICE_ATTENTION),
        ("--scheduler-option", LATENCY_MODELS),
    ],
)
def test_help_has_all_names(program, flag, registry):
    (text,) = (action.help for action in program.build_parser()._actions if flag in action.option_strings)
    assert set(registry.names()) <= set(re.findall(r"[\w-]+", text))


def test_classes_replace_the_default_ones_in_their_order():
    flags = "--class chat:LS:0.5:0.05 --class LS:LS::0.2 --class batch:BE --ls-ttft-slo 3"
    assert parse(*flags.split())[1].config.classes == (
        ClassSpec(name="chat", kind="LS", slo=SLO(ttft_s=0.5, tpot_s=0.05)),
        ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=3, tpot_s=0.2)),
        ClassSpec(name="batch", kind="BE"),
    )
    speculating = [
        ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=1, tpot_s=0.1), speculation=True),
        ClassSpec(name="BE", kind="BE", speculation=True),
    ]
    assert [*parse("--class", "LS:LS:1:0.1:speculate", "--class", "BE:BE:speculate")[1].config.classes] == speculating
    thinking = [
        replace(speculating[0], thinking_token_budget=512),
        ClassSpec(name="BE", kind="BE", thinking_token_budget=0),
    ]
    for first in ("LS:LS:1:0.1:thinking=512:speculate", "LS:LS:1:0.1:speculate:thinking=512"):
        assert [*parse("--class", first, "--class", "BE:BE:thinking=0")[1].config.classes] == thinking
    one, other = parse("--ls-tpot-slo", "0.02")[1].config.classes
    assert one.slo == SLO(ttft_s=1.0, tpot_s=0.02)
    assert other == ClassSpec(name="BE", kind="BE")


def test_flags_beside_those_of_engine_config_and_limits_arrive():
    options, loader = parse(
        *"--dtype bfloat16 --device cpu --host 0.0.0.0 --port 0 --kv my.kv:Manager".split(),
        *"--limit max_connections=none --limit profile_time_limit_s=5".split(),
        *"--log-level error --served-model-name nick --profile p.json".split(),
    )
    assert loader.config == EngineConfig(kv="my.kv:Manager")
    assert (loader.dtype, loader.device) == ("bfloat16", "cpu")
    assert (loader.profile, loader.profile_time_limit_s, loader.with_profile) == (Path("p.json"), 5, True)
    assert (options.host, options.port, options.model_names) == ("0.0.0.0", 0, ("nick",))
    assert (options.limits.max_connections, options.log_level) == (None, "error")


@pytest.mark.parametrize(
    ("scheduler", "option", "value"),
    [
        ("omniserve", "max_piggyback_rows=94", 94),
        ("omniserve", "max_piggyback_rows=none", None),
        ("omniserve", "ls_reserve_fraction=0.25", 0.25),
        ("omniserve", "swap_in_delay_s=2.5", 2.5),
        ("llumnix", "min_residence_s=3", 3.0),
        ("neo", "admission=false", False),
        ("apex", "be_order=prefill", "prefill"),
        ("omniserve", "offload_for_time=True", True),
        ("omniserve", "slack=step", "step"),
        ("conserve", "keep_halted=false", False),
    ],
)
def test_options_of_policies_have_their_types(scheduler, option, value):
    config = parse("--scheduler", scheduler, "--scheduler-option", option)[1].config
    assert config.scheduler_options == {option.partition("=")[0]: value}


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:13"])
def test_devices_have_numbers(device):
    assert parse("--device", device)[1].device == device


def test_loader_can_travel_to_another_process():
    _, loader = parse()
    assert pickle.loads(pickle.dumps(loader)) == loader


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--block-size 33", "--block-size must be a power of two, got 33"),
        ("--block-size x", "--block-size: invalid"),
        ("--max-num-batched-tokens 0", "--max-num-batched-tokens must be >= 1, got 0"),
        ("--device-kv-gib 0", "--device-kv-gib must be >= 1, got 0"),
        ("--device-kv-gib nan", "--device-kv-gib: must be a number >= 0, got nan"),
        ("--port 70000", "--port must be in 0..65535, got 70000"),
        ("--port -1", "--port must be in 0..65535, got -1"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--device cuda:x", "--device: must be auto, cpu, cuda or cuda:N, got 'cuda:x'"),
        ("--device gpu", "--device: must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("--ls-ttft-slo 0", "--ls-ttft-slo must be a positive number of seconds"),
        ("--scheduller fcfs", "there is no flag --scheduller; did you mean --scheduler?"),
        ("--bock-size=3", "there is no flag --bock-size; did you mean --block-size?"),
        ("--max_num_seqs 3", "did you mean --max-num-seqs?"),
        ("--max-body-mib2 3", "did you mean --limit max_body_mib=...?"),
        ("--prefix-cache on", "did you mean --execution prefix_cache=...?"),
        ("--qqqqqqqq 3", "there is no flag --qqqqqqqq (--help lists the flags)"),
        ("8000", "unexpected argument '8000'"),
        ("--model /nonexistent", "--model /nonexistent: there is no such folder"),
        ("--model ./nonexistent", "there is no such folder"),
        ("--model a/b/c", "a hub id is NAME or OWNER/NAME"),
        ("--model /", "this folder has no config.json"),
        (f"--model {__file__}", "is a file; give the folder"),
        ("--scheduler-option slack=none", "slack must be step or deadline"),
        ("--scheduler-option swap_in_delay_s=-1", "swap_in_delay_s must be a number >= 0, got -1"),
        ("--scheduler-option slack", "--scheduler-option: must be NAME=VALUE, got 'slack'"),
        ("--scheduler-option admission=maybe", "admission must be true or false, got 'maybe'"),
        ("--scheduler-option nap=1", "scheduler 'omniserve' has no option 'nap'; it has"),
        ("--scheduler fcfs --scheduler-option slack=step", "scheduler 'fcfs' has no option 'slack'; it has"),
        ("--scheduler none", "unknown --scheduler 'none'"),
        ("--limit profile_time_limit_s=0", "profile_time_limit_s must be a number > 0, got 0.0"),
        ("--limit engine_restarts=-1", "engine_restarts must be a number >= 0, got -1"),
        ("--limit max_bodies=1", "--limit has no option 'max_bodies'; it has max_body_mib, "),
        ("--limit max_queued_requests=x", "max_queued_requests must be of type int, got 'x'"),
        ("--execution step_graphs=maybe", "step_graphs must be auto or on or off, got 'maybe'"),
        ("--execution step_graphs_gib=-1", "step_graphs_gib must be a number >= 0, got -1"),
        (
            "--class chat",
            "must be NAME:KIND or NAME:KIND:TTFT:TPOT, and behind it :thinking=TOKENS or :speculate, got 'chat'",
        ),
        ("--class chat:LS:thinking=", "and behind it :thinking=TOKENS"),
        ("--class chat:LS:thinking=99999999999", "the thinking budget of class 'chat' must be 0 to"),
        ("--class chat:LS:1", "--class: must be NAME:KIND or NAME:KIND:TTFT:TPOT"),
        ("--class chat:XX", "must be 'LS' or 'BE', got 'XX'"),
        ("--class :LS", "must be a non-empty string"),
        ("--class chat:LS:x:1", "could not convert"),
        ("--class chat:LS:0:1", "must be a positive number of seconds"),
        ("--class a:LS --class a:BE", "--class must have different names"),
        ("--class a:LS", "one of kind BE"),
        ("--class a:BE --class b:LS", "--class of kind LS must come before"),
        ("--scheduler-option ls_reserve_fraction=1", "ls_reserve_fraction must be in [0, 1), got 1"),
        ("--host-cores 3-1", "--host-cores: must be cores and ranges of them, such as 0-3,8, got '3-1'"),
        ("--host-cores 1,,2", "--host-cores: must be cores"),
        ("--host-cores 1 --replicas 2", "--host-cores is of one engine; leave it out, or --replicas"),
        ("--class a:LS --class b:BE --ls-ttft-slo 1", "--ls-tpot-slo need a class named LS"),
    ],
)
def test_wrong_flag(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "usage" not in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bock-size: 16", "there is no setting 'bock-size'; did you mean block-size?"),
        ("block: 16", "there is no setting 'block'"),  # as a flag it would do as the beginning of one
        ("port: 1\nqqqqqqqq: [1, 2]", "there is no setting 'qqqqqqqq' ("),
        ("max-body-mib2: 16", "did you mean limit max_body_mib=...?"),
        ("block-size: x", "argument --block-size: invalid int value: 'x' (in {file})"),
        ("block-size: 33", "--block-size must be a power of two, got 33 (in {file})"),
        ("model: /nonexistent", "--model /nonexistent: there is no such folder"),
    ],
)
def test_a_wrong_line_of_a_file_is_told_with_the_file(tmp_path, capsys, text, message):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse_args(["--config", str(file)])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    assert message.format(file=file) in error and str(file) in error


def test_a_wrong_value_of_a_variable_is_told_with_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("OMNISERVE_BLOCK_SIZE", "x")
    with pytest.raises(SystemExit):
        parse()
    assert "invalid int value: 'x' (in OMNISERVE_BLOCK_SIZE)" in capsys.readouterr().err


def test_a_variable_that_is_no_setting_is_told(monkeypatch, caplog):
    for name in ("OMNISERVE_PROT", "OMNISERVE_HELP", "OMNISERVE_ISA", "OMNISERVE_LOG_LEVEL", "OMNISERVE_SERVICE_HOST",
                 "OMNISERVE_SERVICE_PORT_HTTP", "OMNISERVE_PORT_8000_TCP_ADDR", "OMNISERVE_RANK_SECRET"):  # fmt: skip
        monkeypatch.setenv(name, "info")
    assert parse()[0].port == 8000
    assert [record.getMessage() for record in caplog.records] == [
        "the variable OMNISERVE_HELP is no setting and has no effect",
        "the variable OMNISERVE_PROT is no setting and has no effect; did you mean OMNISERVE_PORT?",
    ]


def test_every_variable_that_is_read_is_known():
    """The variables are those of the programs; the others are flags."""
    folder = Path(cli.__file__).parents[1]
    read = {
        name for path in folder.rglob("*.py") for name in re.findall(r'"(OMNISERVE_[A-Z_]*[A-Z])"', path.read_text())
    }
    read |= {name for path in folder.rglob("*.cpp") for name in re.findall(r'"(OMNISERVE_[A-Z_]+)"', path.read_text())}
    read.discard("OMNISERVE_API_KEY")  # the variable of --api-key, which ``omniserve engines`` has, too
    assert read == set(settings_parser.OTHER_VARIABLES)


@pytest.mark.parametrize("alone", slow_except((False,), (False, True)), ids=["here", "in a process"])
@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("profile", "--time-limt 3", "did you mean --time-limit?"),
        ("profile", "--model /nonexistent", "--model /nonexistent: there is no such folder"),
        ("prefill", "--lisen x", "did you mean --listen?"),
        ("simulate", "--scheduller x", "did you mean --scheduler?"),
        ("host", "--lisen x", "did you mean --listen?"),
        ("rank", "--secret-fil x --once2", "there is no flag --once2; did you mean --once?"),
        ("cluster", "--adress x", "did you mean --address?"),
        ("explain", "steps.jsonl --topp 3", "did you mean --top?"),
        ("batch", "submit x.jsonl --urll x", "did you mean --url?"),
        ("batch", "run x.jsonl -o y.jsonl --modle x", "did you mean --model?"),
        ("batch", "sumbit x.jsonl", "invalid choice: 'sumbit'"),
    ],
)
def test_every_program_tells_a_mistake_in_one_line(program, arguments, message, alone, monkeypatch, capfd):
    if alone:
        command = [sys.executable, "-m", f"omniserve.{program}", *arguments.split()]
        status = subprocess.run(command, timeout=120).returncode
    else:
        monkeypatch.setattr(sys, "argv", [program, *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"omniserve.{program}", run_name="__main__")
        status = ended.value.code
    told = capfd.readouterr().err
    assert status == 2 and message in told
    assert told.count("\n") == 1, told
