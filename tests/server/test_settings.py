"""Flags before the environment, that before the file, that before the defaults."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import yaml

from omniserve.core.config import (
    DiskKVConfig,
    EngineConfig,
    ExecutionConfig,
    HostsConfig,
    LoRAConfig,
    ParallelConfig,
    PrefillConfig,
)
from omniserve.core.request import ClassSpec
from omniserve.server.access.limits import Limits
from omniserve.server.cli import build_parser, parse_args

# Field of EngineConfig -> the setting for it, a value of that, and what the field is then; not its default.
SETTINGS = {
    "scheduler": ("scheduler", "fcfs", "fcfs"),
    "scheduler_options": (
        "scheduler-option",
        ["slack=step", "swap_in_delay_s=2.5"],
        {"slack": "step", "swap_in_delay_s": 2.5},
    ),
    "kv": ("kv", "paged", "paged"),
    "execution": (
        "execution",
        ["compile=false", "attention=sdpa", "async_steps=true", "step_graphs=off", "step_graphs_gib=1"],
        ExecutionConfig(compile=False, attention="sdpa", async_steps=True, step_graphs="off", step_graphs_gib=1),
    ),
    "device_kv_bytes": ("device-kv-gib", 0.5, 1 << 29),
    "host_kv_bytes": ("host-kv-gib", 0, 0),
    "host_kv_dtype": ("host-kv-dtype", "int8", "int8"),
    "disk_kv": ("disk-kv-gib", 1.5, DiskKVConfig(gib=1.5)),
    "lora": ("max-loras", 3, LoRAConfig(max_loras=3)),
    "hosts": ("cpu-host-timeout", 2.5, HostsConfig(cpu_host_timeout_s=2.5)),
    "prefill": ("prefill-timeout", 2.5, PrefillConfig(prefill_timeout_s=2.5)),
    "parallel": ("tensor-parallel-size", 2, ParallelConfig(tensor_parallel_size=2)),
    "block_size": ("block-size", 16, 16),
    "max_model_len": ("max-model-len", 99, 99),
    "max_num_batched_tokens": ("max-num-batched-tokens", 98, 98),
    "max_num_seqs": ("max-num-seqs", 97, 97),
    "max_host_requests": ("max-host-requests", 96, 96),
    "max_piggyback_seats": ("max-piggyback-seats", 95, 95),
    "trace_steps": ("trace-steps", "steps.jsonl", "steps.jsonl"),
    "device_threads": ("device-threads", 5, 5),
    "host_threads": ("host-threads", 6, 6),
    "host_cores": ("host-cores", "8,0-2", (8, 0, 1, 2)),
    "classes": (
        "class",
        ["a:LS:thinking=9:speculate", "b:BE"],
        (ClassSpec(name="a", kind="LS", speculation=True, thinking_token_budget=9), ClassSpec(name="b", kind="BE")),
    ),
    "seed": ("seed", 7, 7),
}


@pytest.fixture
def file(tmp_path):
    path, keys = tmp_path / "settings.yaml", tmp_path / "keys.yaml"
    keys.write_text("[{name: me, key: secret}]")
    path.write_text(
        """
block-size: 16
port: 1234
device-kv-gib: 0.7
guard-all: true
api-key-file: KEYS
execution: [compile=false]
scheduler-option: [slack=step]
class: [chat:LS:0.5:0.05, batch:BE]
cors-origin: https://a.example
profile: p.json
""".replace("KEYS", str(keys))
    )
    return path


def test_file_sets_what_nothing_else_does(file):
    options, loader = parse_args(["--config", str(file)])
    config = loader.config
    assert (config.block_size, options.port, config.execution.compile) == (16, 1234, False)
    assert (options.guard_all, config.scheduler_options) == (True, {"slack": "step"})
    assert config.device_kv_bytes == int(0.7 * 2**30)
    assert [spec.name for spec in config.classes] == ["chat", "batch"]
    assert options.cors_origins == ("https://a.example",)
    assert str(loader.profile) == "p.json"


def test_environment_wins_over_the_file(file, monkeypatch):
    monkeypatch.setenv("OMNISERVE_CONFIG", str(file))
    monkeypatch.setenv("OMNISERVE_BLOCK_SIZE", "32")
    monkeypatch.setenv("OMNISERVE_GUARD_ALL", "false")
    monkeypatch.setenv("OMNISERVE_SCHEDULER_OPTION", '["admission=false"]')
    monkeypatch.setenv("OMNISERVE_CLASS", '["a:LS", "b:BE"]')
    options, loader = parse_args([])
    config = loader.config
    assert (config.block_size, options.port, config.execution.compile) == (32, 1234, False)
    assert (options.guard_all, config.scheduler_options) == (False, {"admission": False})
    assert [spec.name for spec in config.classes] == ["a", "b"]


def test_flags_win_over_all(file, monkeypatch):
    monkeypatch.setenv("OMNISERVE_BLOCK_SIZE", "32")
    flags = "--block-size 64 --port=5 --class x:LS --class y:BE --profile none".split()
    options, loader = parse_args(["--config", str(file), *flags])
    assert (loader.config.block_size, options.port) == (64, 5)
    assert [spec.name for spec in loader.config.classes] == ["x", "y"]
    assert not loader.with_profile and loader.profile is None


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EngineConfig)])
def test_every_field_of_engine_config_can_be_set(field, source, monkeypatch, tmp_path, capsys):
    assert field in SETTINGS, f"EngineConfig.{field} has no flag: add one in engine_flags, and an entry here"
    setting, value, expected = SETTINGS[field]
    config = dataclasses.replace(EngineConfig(), **{field: expected})
    assert config != EngineConfig(), "its default tells nothing"
    arguments = []
    if source == "flag":
        for item in value if isinstance(value, list) else [value]:
            arguments += [f"--{setting}"] if item is True else [f"--{setting}", str(item)]
    elif source == "environment":
        text = json.dumps(value) if isinstance(value, list | bool) else str(value)
        monkeypatch.setenv(f"OMNISERVE_{setting.replace('-', '_').upper()}", text)
    else:
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump({setting: value}))
        arguments = ["--config", str(path)]
    assert parse_args(arguments)[1].config == config
    assert read_again(tmp_path, capsys, *arguments)[1].config == config


def test_ranks_may_come_from_other_machines(tmp_path, capsys):
    flags = ["--tensor-parallel-size", "4", "--rank-listen", "10.0.0.1:7000", "--rank-timeout", "5"]
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert "--rank-listen needs --rank-secret-file" in capsys.readouterr().err
    flags += ["--rank-secret-file", "secret"]
    _, loader = parse_args(flags)
    assert loader.config.parallel == ParallelConfig(
        tensor_parallel_size=4, rank_listen="10.0.0.1:7000", rank_secret_file="secret", rank_timeout_s=5.0
    )


def test_there_may_be_cpu_hosts_on_the_network(tmp_path, capsys):
    flags = ["--cpu-hosts", "10.0.0.2:7001, 10.0.0.3:7001"]
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert "--cpu-hosts needs --cpu-host-secret-file" in capsys.readouterr().err
    flags += ["--cpu-host-secret-file", "secret"]
    _, loader = parse_args(flags)
    hosts = HostsConfig(cpu_hosts=("10.0.0.2:7001", "10.0.0.3:7001"), cpu_host_secret_file="secret")
    assert loader.config.hosts == hosts
    assert read_again(tmp_path, capsys, *flags)[1].config == loader.config
    for more, told in (
        (["--host-kv-gib", "0"], "--cpu-hosts are used when"),
        (["--cpu-hosts", "a:1,a:1"], "--cpu-hosts names a host twice"),
    ):
        with pytest.raises(SystemExit):
            parse_args([*flags, *more])
        assert told in capsys.readouterr().err


def test_the_disk_tier_has_three_flags(tmp_path, capsys):
    flags = ["--disk-kv-gib", "0.5", "--disk-kv-dir", "/somewhere", "--disk-kv-keep"]
    _, loader = parse_args(flags)
    assert loader.config.disk_kv == DiskKVConfig(gib=0.5, dir="/somewhere", keep=True)
    assert read_again(tmp_path, capsys, *flags)[1].config == loader.config
    for bad in ("-1", "nan"):
        with pytest.raises(SystemExit):
            parse_args(["--disk-kv-gib", bad])
        assert "--disk-kv-gib must be a number >= 0" in capsys.readouterr().err
    for flags, told in (
        (["--disk-kv-keep"], "give --disk-kv-gib"),
        (["--disk-kv-dir", "/somewhere"], "give --disk-kv-gib"),
        (["--disk-kv-gib", "1", "--host-kv-gib", "0"], "give --host-kv-gib"),
        (["--disk-kv-gib", "1", "--host-kv-dtype", "int8"], "set host_prefixes to True and --host-kv-dtype to auto"),
        (["--disk-kv-gib", "1", "--execution", "host_prefixes=false"], "or --disk-kv-gib to 0"),
    ):
        with pytest.raises(SystemExit):
            parse_args(flags)
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
def test_every_limit_can_be_set(name, tmp_path, capsys):
    value = (getattr(Limits(), name) or 1000) + 5
    options, loader = parse_args(["--limit", f"{name}={value}"])
    assert getattr(options.limits, name) == value
    assert read_again(tmp_path, capsys, "--limit", f"{name}={value}") == (options, loader)
    usual, usual_loader = parse_args([])
    assert options.batches == usual.batches
    assert (loader != usual_loader) == (name in ("profile_time_limit_s", "profile_start_s"))


def test_there_are_not_many_flags():
    """A setting that few people change is an option of ``--execution``, ``--scheduler-option`` or ``--limit``."""
    assert len(build_parser()._actions) - len(["--help"]) <= 78
    assert len(dataclasses.fields(EngineConfig)) <= 24


def test_help_tells_each_option_of_a_group(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    shown = capsys.readouterr().out
    for name in [*(field.name for field in dataclasses.fields(Limits)), "step_graphs", "be_order", "keep_halted"]:
        assert re.search(rf"^  {name}=\S+\n    +\w", shown, re.MULTILINE), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: [1, 2]", "can't be set to a list"),
        ("guard-all: perhaps", "Unexpected value for guard-all"),
        ("- port", "key: value"),
        ("port: {", "Couldn't parse config file"),
    ],
)
def test_file_that_is_wrong(tmp_path, capsys, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse_args(["--config", str(path)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_file_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--config", "/no/such/file"])
    assert "/no/such/file" in capsys.readouterr().err


def test_wrong_environment(monkeypatch, capsys):
    monkeypatch.setenv("OMNISERVE_PORT", "-1")
    with pytest.raises(SystemExit):
        parse_args([])
    assert "--port must be in 0..65535, got -1" in capsys.readouterr().err


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        parse_args([*arguments, "--print-config"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def read_again(tmp_path, capsys, *arguments):
    """Return what a file means that holds what is printed for arguments."""
    path = tmp_path / "again.yaml"
    path.write_text(printed(capsys, *arguments))
    return parse_args(["--config", str(path)])


def test_settings_are_printed_with_where_they_come_from(file, monkeypatch, capsys):
    monkeypatch.setenv("OMNISERVE_MAX_NUM_BATCHED_TOKENS", "77")
    lines = printed(capsys, "--config", str(file), "--scheduler", "neo", "--api-key", "hidden").splitlines()
    for line in (
        f"block-size: 16  # {file}",
        "max-num-batched-tokens: 77  # environment",
        "scheduler: neo  # flag",
        "host: 127.0.0.1  # default",
        f"class: ['chat:LS:0.5:0.05', 'batch:BE']  # {file}",
    ):
        assert line in lines
    assert "hidden" not in "".join(lines) and "# api-key: not shown  # flag" in lines


def test_what_is_printed_instead_of_a_key_is_none(tmp_path, capsys):
    assert read_again(tmp_path, capsys, "--api-key", "hidden")[0].keys is None


def test_what_is_printed_means_the_same(file, tmp_path, capsys):
    text = printed(capsys, "--config", str(file), "--scheduler-option", "swap_in_delay_s=0.25", "--model", "m")
    assert yaml.safe_load(text)["scheduler-option"] == ["swap_in_delay_s=0.25"]
    again = tmp_path / "again.yaml"
    again.write_text(text)
    options, loader = parse_args(["--config", str(file), "--scheduler-option", "swap_in_delay_s=0.25", "--model", "m"])
    options_again, loader_again = parse_args(["--config", str(again)])
    assert dataclasses.replace(options_again, keys=options.keys) == options  # key rings are not compared
    assert loader_again == loader
