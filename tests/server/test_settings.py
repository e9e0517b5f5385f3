"""Flags before the environment, that before the file, that before the defaults."""

from __future__ import annotations

import pytest
import yaml

from omniserve.server.cli import parse_args


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(
        """
block-size: 16
port: 1234
device-kv-gib: 0.7
no-compile: true
checkpoint-kv: false
class: [chat:LS:0.5:0.05, batch:BE]
cors-origin: https://a.example
profile: p.json
"""
    )
    return path


def test_file_sets_what_nothing_else_does(file):
    options, loader = parse_args(["--config", str(file)])
    config = loader.config
    assert (config.block_size, options.port, config.compile, config.checkpoint_kv) == (16, 1234, False, False)
    assert config.device_kv_bytes == int(0.7 * 2**30)
    assert [spec.name for spec in config.classes] == ["chat", "batch"]
    assert options.cors_origins == ("https://a.example",)
    assert str(loader.profile) == "p.json"


def test_environment_wins_over_the_file(file, monkeypatch):
    monkeypatch.setenv("OMNISERVE_CONFIG", str(file))
    monkeypatch.setenv("OMNISERVE_BLOCK_SIZE", "32")
    monkeypatch.setenv("OMNISERVE_NO_COMPILE", "false")
    monkeypatch.setenv("OMNISERVE_CHECKPOINT_KV", "true")
    monkeypatch.setenv("OMNISERVE_CLASS", '["a:LS", "b:BE"]')
    options, loader = parse_args([])
    config = loader.config
    assert (config.block_size, options.port, config.compile, config.checkpoint_kv) == (32, 1234, True, True)
    assert [spec.name for spec in config.classes] == ["a", "b"]


def test_flags_win_over_all(file, monkeypatch):
    monkeypatch.setenv("OMNISERVE_BLOCK_SIZE", "32")
    flags = "--block-size 64 --port=5 --class x:LS --class y:BE --no-profile".split()
    options, loader = parse_args(["--config", str(file), *flags])
    assert (loader.config.block_size, options.port) == (64, 5)
    assert [spec.name for spec in loader.config.classes] == ["x", "y"]
    assert not loader.with_profile and loader.profile is None, "one of the two flags that exclude each other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block-size: 33", "--block-size must be a power of two, got 33"),
        ("blok-size: 16", "unrecognized arguments: --blok-size=16"),
        ("port: [1, 2]", "can't be set to a list"),
        ("no-compile: perhaps", "Unexpected value for no-compile"),
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
    assert "--port: must be >= 0, got -1" in capsys.readouterr().err


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        parse_args([*arguments, "--print-config"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_settings_are_printed_with_where_they_come_from(file, monkeypatch, capsys):
    monkeypatch.setenv("OMNISERVE_MAX_STEP_TOKENS", "77")
    lines = printed(capsys, "--config", str(file), "--scheduler", "fcfs", "--api-key", "hidden").splitlines()
    for line in (
        f"block-size: 16  # {file}",
        "max-step-tokens: 77  # environment",
        "scheduler: fcfs  # flag",
        "host: 127.0.0.1  # default",
        f"class: ['chat:LS:0.5:0.05', 'batch:BE']  # {file}",
    ):
        assert line in lines
    assert "hidden" not in "".join(lines) and "# api-key: not shown  # flag" in lines


def test_what_is_printed_instead_of_a_key_is_none(tmp_path, capsys):
    again = tmp_path / "again.yaml"
    again.write_text(printed(capsys, "--api-key", "hidden"))
    assert parse_args(["--config", str(again)])[0].keys is None


def test_what_is_printed_means_the_same(file, tmp_path, capsys):
    text = printed(capsys, "--config", str(file), "--swap-in-delay", "0.25", "--model", "m")
    assert yaml.safe_load(text)["swap-in-delay"] == 0.25
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert parse_args(["--config", str(again)]) == parse_args(
        ["--config", str(file), "--swap-in-delay", "0.25", "--model", "m"]
    )
