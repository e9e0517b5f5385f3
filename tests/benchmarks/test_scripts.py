"""Benchmarks that measure an engine or a part of it in this process run from end to end, and write a record."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks.common.terminal import argument_parser

TINY = {
    "sampling": "--vocabulary 100 --rows 1 2 --repeats 2",
    "linears": "--shapes 64x96 --dtypes bfloat16 float32 --rows 1 2 --repeats 1 --cold-mib 1",
    "host_rows": "--shapes 4/2/16 --rows 1 3 --requests 2 --context 40 --repeats 1 --cold-mib 1",
    "decode_rate": "--batches 1 2 --output 3 --repeats 1 --no-compile",
    "drafts": "--models built-in --prompt 8 --output 8 --repeats 1 --profile-s 0.5 --no-compile",
    "step_overhead": "--requests 1 --steps 3",
    "network_hosts": "--shapes 4/2/16 --rows 8 --row-samples 3 --models built-in --be 12 --ls 1 --be-prompt 280 "
    "--window-s 0.2 --repeats 1",
    "tensor_parallel": "--decodes 1 --chunk 8 --rounds 1",
    "pipeline_parallel": "--decodes 1 --prompts 1 --rounds 1",
    "nixl_link": "--arms tcp --rows 1 --blocks 1 --rounds 3 --turns 2",
    "prefill_apart": "--lengths 100 --chunk 64 --rounds 1",
    "scaling": "--rates 2 --tpots 0.2 --seconds 10",
    "shared_cores": "--shares 0 0.5 --requests 2 --steps 2 --repeats 1 "
    "--best-effort 1 --rate 2 --span 2 --models built-in",
}
QUICK = ("sampling", "host_rows")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.exhaustive) for n in TINY])
def test_benchmark_runs_and_is_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [name, *TINY[name].split(), "--record", str(path)])
    importlib.import_module(f"benchmarks.{name}").main()
    record = json.loads(path.read_text())
    assert record["benchmark"] == name and record["results"]


def test_flags_have_the_types_of_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argument_parser("What.", "x", rows=([1, 2], "of it"), rate=0.5, quick=(False, "soon"), folder=Path("docs"))
    args = parser.parse_args(["--rows", "3", "--rate", "2", "--folder", "a/b"])
    assert vars(args) == {
        "rows": [3], "rate": 2.0, "quick": False, "folder": Path("a/b"), "record": Path(".cache/x.json"),
    }  # fmt: skip
    with pytest.raises(SystemExit):
        parser.parse_args(["--rows", "few"])
    assert "argument --rows: invalid int value: 'few'" in capsys.readouterr().err
