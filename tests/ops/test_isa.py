"""One binary serves several instruction sets; each that this machine has is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from omniserve.ops.isa import instruction_sets
from tests.rotation import chosen_of

ISAS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")
CHOSEN = chosen_of(ISAS, 2)
CPU_FLAG = {
    "amx_bf16": "amx_bf16",
    "avx512_bf16": "avx512_bf16",
    "avx512_vnni": "avx512_vnni",
    "avx512": "avx512f",
    "avx2": "avx2",
}
CPU_INFO = Path("/proc/cpuinfo")
FLAGS = CPU_INFO.read_text().split() if CPU_INFO.exists() else []


@pytest.mark.parametrize(
    "isas",
    [(*CHOSEN, "mmx"), pytest.param(tuple(isa for isa in ISAS if isa not in CHOSEN), marks=pytest.mark.slow)],
    ids=", ".join,
)
def test_samples_agree_on_each_set_and_an_unknown_one_is_an_error(isas: tuple[str, ...]) -> None:
    # glibc then fills fresh memory with 0x7f7f7f7f, 3e38: an output that is left unwritten shows.
    env = {**os.environ, "MALLOC_PERTURB_": "128", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "tests.ops.checks", *isas]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    said = {line["isa"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert tuple(said) == isas
    for isa in isas:
        outcome = said[isa]["outcome"]
        assert said[isa]["sets"] == str(instruction_sets()), "what the CPU has does not depend on what is forced"
        if isa == "mmx":
            assert "OMNISERVE_ISA=mmx is unknown" in outcome and "portable" in outcome
        elif "this CPU lacks these instructions" in outcome:
            # The kernels' word is not enough: a dispatcher that finds nothing would skip every test of its own.
            assert CPU_FLAG[isa] not in FLAGS, f"this CPU has {isa}, but the kernels say that it does not"
            warnings.warn(f"not tested, as this CPU lacks it: {isa}", stacklevel=1)
        else:
            assert outcome == "all samples agree"


def test_every_instruction_set_but_the_portable_one_has_fast_linear_kernels() -> None:
    sets = instruction_sets()
    assert "portable" in {each.name for each in sets} <= set(ISAS)
    for each in sets:
        assert (each.linear == "portable") == (each.name == "portable"), each
        # A set's own kernels, or those of a lesser one: what a CPU with the set is sure to have.
        assert ISAS.index(each.linear) >= ISAS.index(each.name), each


@pytest.mark.skipif(not FLAGS, reason="no /proc/cpuinfo to compare with")
def test_no_set_is_said_to_be_there_that_the_cpus_flags_lack() -> None:
    supported = {each.name for each in instruction_sets() if each.supported}
    assert supported - {"portable"} <= {name for name, flag in CPU_FLAG.items() if flag in FLAGS}
