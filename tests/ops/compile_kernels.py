"""Compile the Triton kernels without a GPU: what the interpreter lets pass may still not compile, or not fit a device.

Run as a program, in a process of its own (the interpreter is chosen when Triton is imported):

    python -m tests.ops.compile_kernels             # QUICK: a line of JSON for each kernel
    python -m tests.ops.compile_kernels --all       # every case for every device: some 4 minutes
    python -m tests.ops.compile_kernels --write     # the same, into tests/ops/kernel_resources/triton-VERSION.json

The tables are for the Tritons that come with the oldest and the newest torch of pyproject.toml and with that of
constraints.txt (torch 2.11.0: triton 3.6.0; 2.12.0: 3.7.0; 2.13.0: 3.7.1; 2.14.1: 3.8.0; 2.15.0: 3.9.0). To take
another one than the environment's: ``pip install --no-deps --target /tmp/triton triton==3.6.0`` and
``PYTHONPATH=/tmp/triton``. They bring an assembler for sm_100 and sm_120 along.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.ops.compile_cases import DEVICES, QUICK, Launch, attention_steps, cases, lora_steps, moves, steps

TABLES = Path(__file__).with_name("kernel_resources")
_PTX_ACCESS = re.compile(r"\b(?:(?:ld|st|atom|red)\.(?:\w+\.)*global\S*|bar\.sync)")
_SASS_ACCESS = re.compile(
    r"^\s*/\*\w+\*/\s*((?:@\S+\s+)?(?:STG?|ATOM\w*|RED\w*|BAR|MEMBAR|FENCE)\b\S*|@\S+\s+(?:EXIT|BRA)\b)", re.M
)
"""Stores, atomics, barriers, fences, and what only some threads pass."""


def compiled(launches: Iterable[Launch], capability: int) -> Iterator[Any]:
    """Yield the kernels that each call would launch on a device, compiled, in order; nothing runs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        """The part of a driver that a compiler asks for."""

        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    try:
        for launch in launches:
            launch(DEVICES[capability])
            yield from kernels
            kernels.clear()
    finally:
        JITFunction.run = run


def describe(kernel: Any, *, with_accesses: bool) -> dict[str, Any]:
    """Return what a compiled kernel takes of a device, and its memory accesses.

    ``stack`` is the bytes of a thread's stack: the kernels have nothing to put there but registers that do not fit.
    """
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def ask(tool: str, option: str) -> str:
            command = [getattr(triton.knobs.nvidia, tool).path, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        found = re.search(r"REG:(\d+) STACK:(\d+)", ask("cuobjdump", "--dump-resource-usage"))
        assert found, "cuobjdump says nothing of registers"
        about = {"kernel": kernel.metadata.name, "registers": int(found[1]), "stack": int(found[2])}
        about |= {"shared": kernel.metadata.shared}
        if with_accesses:
            sass = [" ".join(access.split()) for access in _SASS_ACCESS.findall(ask("nvdisasm", "--print-code"))]
            ptx = kernel.asm["ptx"]
            about |= {"ptx": _PTX_ACCESS.findall(ptx), "sass": sass, "is_async": "cp.async" in ptx}
            about |= {"wgmma": "wgmma" in ptx, "tcgen05": "tcgen05" in ptx}
            about |= {"mma": sorted(set(re.findall(r"mma\.sync\S*", ptx)))}
    return about


def print_quick() -> None:
    """Print QUICK, and how many kernels are compiled for what differs between steps and moves.

    These are steps that move rows, moves, steps of decodes, and steps with adapters.
    """
    known = cases()
    for name, capability in QUICK:
        for kernel in compiled([known[name]], capability):
            print(json.dumps({"case": name, "sm": capability} | describe(kernel, with_accesses=True)), flush=True)
    varied = (steps(), moves(), attention_steps(), lora_steps())
    print(json.dumps([len({id(kernel) for kernel in compiled(launches, 90)}) for launches in varied]))


def resources() -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Yield each kernel of each case, and its registers, stack and shared memory for each device.

    Of kernels with one label, these are the most that any of them takes.
    """
    for name, launch in cases().items():
        rows: dict[str, dict[str, list[int]]] = {}
        for capability in DEVICES:
            for kernel in compiled([launch], capability):
                about = describe(kernel, with_accesses=False)
                label = name.replace("attend", "combine") if about["kernel"] == "_combine" else name
                most = rows.setdefault(label, {}).setdefault(f"sm_{capability}", [0, 0, 0])
                most[:] = map(max, most, (about[key] for key in ("registers", "stack", "shared")))
        yield from rows.items()


def main() -> None:
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if not (args.all or args.write):
        print_quick()
        return
    lines = []
    for label, row in resources():
        lines.append(f"{json.dumps(label)}: {json.dumps(row)}")
        print(lines[-1], flush=True)
    if args.write:
        TABLES.mkdir(exist_ok=True)
        (TABLES / f"triton-{triton.__version__}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
