"""What the compiler makes of the layers for a GPU, counted on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ALIKE = ("llama", "qwen2", "gemma2", "phi3")


def test_launches_between_two_attentions() -> None:
    command = [sys.executable, "-m", "tests.layers.cuda_launches", *ALIKE, "qwen3", "llama/apart"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    launches = {name: found for name, *found in map(str.split, done.stdout.splitlines())}
    for name in ALIKE:
        # o, norm, gate and up, activation, down, norm, q and k and v, rotary
        kinds = ["mm" if each in ("mm", "addmm") else each.split("_")[1] for each in launches[name]]
        assert kinds == ["mm", "red", "mm", "poi", "mm", "red", "mm", "poi"], name
    assert len(launches["qwen3"]) == 9 and launches["qwen3"].count("mm") == 4, "norm and rotary of q, and of k"
    assert len(launches["llama/apart"]) == 15 and launches["llama/apart"].count("mm") == 7
