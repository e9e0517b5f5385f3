"""The attention and linear kernels under the sanitizers, on random cases; every instruction set that this machine has.

python -m tests.ops.test_sanitizers address 60 7    # a longer run: sanitizer, seconds per instruction set, first seed
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from tests.builds import built
from tests.ops.test_isa import ISAS

CSRC = Path(__file__).parents[2] / "omniserve" / "ops" / "csrc"
FLAGS = {"address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "thread": ["-fsanitize=thread"]}


def build(sanitizer: str) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "the project needs a C++ compiler: install g++ or set CXX"
    sources = [Path(__file__).with_name("kernel_fuzz.cpp"), CSRC / "host_kv.cpp"]
    sources += [*CSRC.glob("attention*.cpp"), *CSRC.glob("linear*.cpp")]
    sources = [source for source in sources if not source.name.endswith("_ops.cpp")]
    flags = ["-std=c++17", "-O2", "-g1", "-pthread", "-Wno-unknown-pragmas", f"-I{CSRC}"]

    def compiled(source: Path) -> Path:
        # Not the fuzzer itself: its loops would take most of the time.
        options = FLAGS[sanitizer] if source.parent == CSRC else []
        return built(f"{source.stem}.o", [compiler, *flags, *options, "-c", source], [source, *CSRC.iterdir()])

    with ThreadPool(len(os.sched_getaffinity(0))) as pool:  # of compilers, which do the work
        objects = pool.map(compiled, sources)
    return built("kernel_fuzz", [compiler, *flags, *FLAGS[sanitizer], *objects], objects)


def fuzz(program: Path, isa: str, first_seed: int, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(first_seed), str(seconds)]
    return subprocess.run(command, env={**os.environ, "OMNISERVE_ISA": isa}, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", FLAGS)
def test_random_cases_under_a_sanitizer(sanitizer: str) -> None:
    program = build(sanitizer)
    ran = 0
    for isa in ISAS:
        done = fuzz(program, isa, 1, 3)
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("this kernel's address randomisation is more than the sanitizer can take")
        if "this CPU lacks these instructions" in done.stderr:  # test_isa.py checks that it really does
            continue
        assert done.returncode == 0, f"{isa}: {done.stdout}{done.stderr}"
        ran += 1
    assert ran > 0  # "portable" at least


if __name__ == "__main__":
    fuzzer = build(sys.argv[1])
    for isa in ISAS:
        finished = fuzz(fuzzer, isa, int(sys.argv[3]), float(sys.argv[2]))
        print(sys.argv[1], finished.stdout.strip() or finished.stderr.strip(), flush=True)
        if finished.returncode != 0 and "this CPU lacks these instructions" not in finished.stderr:
            sys.exit(1)
