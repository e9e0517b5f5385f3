"""One binary serves several instruction sets; each that this machine has is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omniserve.ops.isa import instruction_sets
from tests.rotation import rotating

ISAS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable")


def run_checks(isa: str) -> subprocess.CompletedProcess[str]:
    # glibc then fills fresh memory with 0x7f7f7f7f, 3e38: an output that is left unwritten shows.
    env = {
        **os.environ,
        "OMNISERVE_ISA": isa,
        "MALLOC_PERTURB_": "128",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }
    return subprocess.run([sys.executable, "-m", "tests.ops.checks"], env=env, capture_output=True, text=True)


CPU_FLAG = {"amx_bf16": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2"}


@pytest.mark.parametrize("isa", rotating(ISAS, 2))
def test_samples_agree_on(isa: str) -> None:
    done = run_checks(isa)
    if "this CPU lacks these instructions" in done.stderr:
        # The kernels' word is not enough: a dispatcher that finds nothing would skip every test of its own.
        flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
        assert CPU_FLAG[isa] not in flags, f"this CPU has {isa}, but the kernels say that it does not"
        pytest.skip(f"this CPU has no {isa}")
    assert done.stdout.strip() == "all samples agree", done.stderr


def test_every_instruction_set_but_the_portable_one_has_fast_linear_kernels() -> None:
    sets = instruction_sets()
    assert "portable" in {each.name for each in sets} <= set(ISAS)
    for each in sets:
        assert (each.linear == "portable") == (each.name == "portable"), each
        # A set's own kernels, or those of a lesser one: what a CPU with the set is sure to have.
        assert ISAS.index(each.linear) >= ISAS.index(each.name), each


def test_what_the_cpu_has_does_not_depend_on_the_set_that_is_forced() -> None:
    code = "from omniserve.ops.isa import *; print(instruction_sets())"
    env = {**os.environ, "OMNISERVE_ISA": "portable"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(instruction_sets())


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo to compare with")
def test_no_set_is_said_to_be_there_that_the_cpus_flags_lack() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    supported = {each.name for each in instruction_sets() if each.supported}
    assert supported - {"portable"} <= {name for name, flag in CPU_FLAG.items() if flag in flags}


def test_an_unknown_instruction_set_is_an_error_that_lists_the_known() -> None:
    done = run_checks("mmx")
    assert done.returncode != 0
    assert "OMNISERVE_ISA=mmx is unknown" in done.stderr and "portable" in done.stderr
