"""Counts the launches that the compiler makes of the layers for a GPU, on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omniserve.layers.compiled import needs_example

pytest.importorskip("triton")

ALIKE = ("llama", "qwen2", "gemma2", "phi3")


@pytest.mark.slow
def test_launches_between_two_attentions() -> None:
    seen = ("llama/example", "qwen3/example")
    command = [sys.executable, "-m", "tests.layers.cuda_launches", *ALIKE, "qwen3", *seen, "llama/apart"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    launches = {name: found for name, *found in map(str.split, done.stdout.splitlines())}
    if needs_example(on_gpu=True):  # what this torch makes of a hint is not what it is given
        launches |= {name: launches["llama/example"] for name in ALIKE} | {"qwen3": launches["qwen3/example"]}
    for name in (*ALIKE, "llama/example"):
        # o, norm, gate and up, activation, down, norm, q and k and v, rotary of q, and of k
        kinds = ["mm" if each in ("mm", "addmm") else each.split("_")[1] for each in launches[name]]
        assert kinds == ["mm", "red", "mm", "poi", "mm", "red", "mm", "poi", "poi"], name
    for name in ("qwen3", "qwen3/example"):
        assert len(launches[name]) == 9 and launches[name].count("mm") == 4, "norm and rotary of q, and of k"
    assert len(launches["llama/apart"]) == 15 and launches["llama/apart"].count("mm") == 7
