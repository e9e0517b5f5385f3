"""Stale records: marked with a reason, renewed on a machine of their kind only, and said to be stale where quoted."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import coserve, renew
from benchmarks.common.record import ROOT, environment, portable, read_record, stale_reason

RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
STALE = [path for path in RECORDS if stale_reason(read_record(path))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records of this kind of machine and of another: two stale ones, one that is not."""
    here = environment()["hardware"]
    elsewhere = here | {"cpu": "another", "cpu_features": ["amx_bf16"]}
    for name, hardware, stale in (
        ("shared_cores.json", here, {"stale": "slow"}),
        ("coserve.json", elsewhere, {"stale": "slower"}),
        ("demo.json", here, {}),
    ):
        (tmp_path / name).write_text(json.dumps({"environment": {"hardware": hardware}} | stale))
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have been run."""
    seen: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command[1:])
        return subprocess.CompletedProcess(command, 0)

    found = environment()  # which runs git
    monkeypatch.setattr(renew, "environment", lambda: copy.deepcopy(found))
    monkeypatch.setattr(renew.subprocess, "run", run)
    return seen


def test_list_measures_nothing(folder: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert renew.main(["--list"], folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and not commands
    assert lines[0].startswith("coserve.json (made on") and "another" in lines[0] and lines[0].endswith("slower")
    assert lines[1] == "shared_cores.json (this kind of machine): slow"


def test_only_stale_records_of_this_kind_of_machine_are_renewed(
    folder: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert renew.main([], folder) == 2
    assert commands == [["-m", "benchmarks.shared_cores", "--record", str(folder / "shared_cores.json")]]
    assert "coserve.json was made on" in capsys.readouterr().err


def test_a_failed_benchmark_is_a_failure(folder: Path, commands: list[list[str]], monkeypatch: Any) -> None:
    monkeypatch.setattr(renew, "renew", lambda path: False)
    assert renew.main([], folder) == 1


@pytest.mark.parametrize("path", STALE, ids=lambda path: path.name)
def test_a_stale_record_can_be_renewed_and_says_so_where_it_is_quoted(path: Path) -> None:
    assert path.name in renew.COMMANDS
    pages = renew.pages_with(path)
    assert pages
    for page in pages:
        paragraphs = (ROOT / page).read_text().split("\n\n")
        quoting = [paragraph for paragraph in paragraphs if f"results/{path.name}" in paragraph]
        assert quoting and all("stale" in paragraph for paragraph in quoting)


# Records keep the names that policies had when they were made.
NAMED_NOW = {"bros,checkpoint-kv": "bros,scheduler-option=checkpoint_kv=true"}
NEWER = {"omniserve-paper"}
"""Policies that there were not when they were made."""


@pytest.mark.parametrize(
    "path", [path for path in STALE if path.name.startswith("coserve")], ids=lambda path: path.name
)
def test_the_command_of_a_stale_record_has_the_settings_that_it_was_made_with(path: Path) -> None:
    module, *arguments = renew.COMMANDS[path.name]
    assert module == "benchmarks.coserve"
    settings, config = portable(vars(coserve.parse_arguments(arguments))), read_record(path)["config"]
    config["policies"] = [NAMED_NOW.get(policy, policy) for policy in config["policies"]]
    settings["policies"] = [policy for policy in settings["policies"] if policy not in NEWER]
    for name in settings.keys() - {"record", "plot", "report", "load"}:
        assert settings[name] == config[name], name
