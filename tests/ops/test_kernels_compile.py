"""The kernels compile for Hopper, with wide accesses and the orders that other processors rely on. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the program prints, read."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels"],
        capture_output=True, text=True, timeout=200, env=env, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def accesses(lines: list[Any]) -> list[tuple[str, list[str]]]:
    """(name, memory accesses of the PTX in their order) of each kernel, for an 8B model in bf16."""
    return [(kernel["name"], kernel["accesses"]) for kernel in lines[:-1]]


def test_every_kernel_compiles(accesses: list[tuple[str, list[str]]]) -> None:
    assert [name for name, _ in accesses] == [
        "_store_kv_kernel",
        "_piggyback_concat_kernel",
        "_scatter_kernel",
        "_fetch_kernel",
        "_scatter_kernel",
        "_piggyback_send_kernel",
        *["_copy_blocks_kernel"] * 5,
    ]


def test_nothing_is_compiled_anew_for_another_step_or_move(lines: list[Any]) -> None:
    assert lines[-1] == [1, 1]


def test_rows_are_moved_in_16_bytes_a_thread(accesses: list[tuple[str, list[str]]]) -> None:
    for name, found in accesses[:5]:
        moved = [access for access in found if access not in ("ld.global.b64", "bar.sync")]  # indices are 8 bytes
        assert set(moved) == {"ld.global.v4.b32", "st.global.v4.b32"}, name


def test_a_copy_crosses_the_bus_in_16_bytes_a_thread(accesses: list[tuple[str, list[str]]]) -> None:
    for _, found in accesses[6:8]:  # to the host: K and V are written wide, V is read in halves of pairs
        assert [access for access in found if access.startswith("st")] == ["st.global.v4.b32"] * 2
    for _, found in accesses[8:10]:  # from it: read wide
        assert found.count("ld.global.v4.b32") == 2 and "ld.global.v2.b32" not in found


def test_the_flag_is_released_to_the_system_behind_everything(accesses: list[tuple[str, list[str]]]) -> None:
    _, found = accesses[5]
    assert found[-2:] == ["bar.sync", "atom.global.sys.release.exch.b64"]
    assert sum(access.startswith("st.global") for access in found) == 4  # q, k, v and the residual: one round of each
