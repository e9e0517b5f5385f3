"""``python -m omniserve.profile``: writes a profile that a server finds; bad input ends with status 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omniserve.latency import Profile
from omniserve.latency.profile import Conditions
from omniserve.launch.profile_cli import main
from tests.parity.models import tiny_model

SMALL = (
    "--device cpu --execution compile=false --device-kv-gib 0.001 --host-kv-gib 0.001 --block-size 8 "
    "--max-num-batched-tokens 32"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def test_it_writes_a_profile_and_says_what_is_in_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "profile.json"
    assert main(["--model", str(folder), "--output", str(path), "--time-limit", "1", *SMALL]) == 0
    assert Profile.read(path).fingerprint.block_size == 8
    printed = capsys.readouterr()
    assert str(path) in printed.out
    assert "dense, alone" in printed.out
    # No terminal: no bar, and one line for each thing that is measured.
    assert "\r" not in printed.err and "100% of the time limit: done" in printed.err
    lines = [line for line in printed.err.splitlines() if "of the time limit: " in line]
    told = [line.split(": ")[1] for line in lines]
    assert len(set(told)) == len(told) > 10


def test_a_grid_needs_a_file_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(folder), "--steps", "grid", *SMALL])
    assert "--steps grid: give --output FILE" in capsys.readouterr().err


def test_a_profile_for_a_server_with_a_disk_tier(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    flags = ["--disk-kv-gib", "0.01", "--disk-kv-dir", str(tmp_path / "kv")]
    assert main(["--model", str(folder), "--output", str(path), "--time-limit", "0.3", *SMALL, *flags]) == 0
    assert Profile.read(path).steps and not (tmp_path / "kv").exists()


def test_of_a_busy_machine_only_a_named_file_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Conditions, "disturbances", lambda self: ["somebody sang"])
    assert main(["--model", str(folder), "--time-limit", "0.1", *SMALL]) == 1
    assert not list(tmp_path.rglob("*.json"))
    assert "somebody sang" in (printed := capsys.readouterr().err) and "--output" in printed
    assert main(["--model", str(folder), "--time-limit", "0.1", "--output", str(tmp_path / "p.json"), *SMALL]) == 0
    assert (tmp_path / "p.json").exists() and "somebody sang" in capsys.readouterr().err


def test_without_output_it_goes_into_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Conditions, "disturbances", lambda self: [])
    assert main(["--model", str(folder), "--time-limit", "0.3", *SMALL]) == 0
    (path,) = (tmp_path / "omniserve" / "profiles").iterdir()
    assert path.stem == Profile.read(path).fingerprint.key
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time-limit", "0"], "must be a number > 0, got 0"),
        (["--time-limit", "soon"], "--time-limit"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_bad_flag_ends_it_with_a_message(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "3"], "--block-size must be a power of two"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--output", "."], "is a folder"),
    ],
)
def test_what_cannot_be_measured_ends_it_with_a_message(
    flags: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = [] if "--output" in flags else ["--output", str(tmp_path / "p.json")]
    assert main(["--model", str(folder), *SMALL, *output, *flags]) == 2
    printed = capsys.readouterr().err
    assert "python -m omniserve.profile: error:" in printed
    assert message in printed
    assert not (tmp_path / "p.json").exists()


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import omniserve.launch.profile_cli as p; p.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--time-limit" in done.stdout
    assert "--host-kv-dtype" in done.stdout
