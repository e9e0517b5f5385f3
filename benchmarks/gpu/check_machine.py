"""Reports what this machine is, what of it is not supported, and whether the C++ extension loads."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.common.bandwidth import available_bytes
from benchmarks.common.record import environment
from benchmarks.gpu.script import NotHere, Script

_FIELDS = (
    "name,compute_cap,driver_version,memory.total,memory.used,clocks.max.sm,clocks.max.mem,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,mig.mode.current,compute_mode"
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine(script: Script) -> None:
    with script.case("nvidia-smi") as case:
        command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise NotHere(f"nvidia-smi does not run: {error}") from error
        values = done.stdout.partition("\n")[0].split(", ")  # of the first GPU
        case.details |= dict(zip(_FIELDS.split(","), values, strict=False))
        case.note = ", ".join(f"{key} {value}" for key, value in case.details.items())
    with script.case("versions") as case:
        case.details |= environment()["versions"] | {"cuda": torch.version.cuda}
        case.note = ", ".join(f"{key} {value}" for key, value in case.details.items() if value)
    with script.case("supported") as case:
        problems = unsupported(script)
        case.note = " ".join(problems) or "nothing here is known to be unsupported"
        if problems and not script.dry:
            raise RuntimeError(case.note)
    with script.case("main memory and cores") as case:
        case.details |= {
            "cores": len(os.sched_getaffinity(0)), "free_gib": round(available_bytes() / 2**30, 1),
            "numa_nodes": len([*Path("/sys/devices/system/node").glob("node[0-9]*")]),
            "huge_pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "unknown",
            "locked_memory_limit_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        }  # fmt: skip
        case.note = ", ".join(f"{key} {value}" for key, value in case.details.items())
    with script.case("the extension loads") as case:
        from tests.ops.table import OPS

        case.note = f"{len(OPS)} operators"
    with script.case("page-locked memory, as the host pool takes it") as case:
        script.needs_gpu()
        case.note = f"{locked_gib():g} GiB in one piece (tried up to 64, or half of what is free)"


def unsupported(script: Script) -> list[str]:
    """Return what of this machine does not work with OmniServe, in sentences."""
    found = []
    if torch.version.cuda is None:
        found.append(f"torch {torch.__version__} is a build without CUDA: install one with it.")
    elif not script.on_gpu:
        try:
            torch.cuda.init()
            reason = "torch.cuda.is_available() is False"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
        found.append(f"torch is built for CUDA {torch.version.cuda} but finds no GPU that it can use: {reason}.")
    if importlib.util.find_spec("triton") is None:
        found.append("Triton is not installed: the row operators, and with them every step on a GPU, need it.")
    if script.on_gpu:
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            found.append(f"Compute capability {major}.{minor} is below 8.0: there is no bf16 in its matrix unit.")
        code = (f"sm_{major}{minor}", f"compute_{major}{minor}", f"sm_{major}0", f"compute_{major}0")
        if not any(name.startswith(code) for name in torch.cuda.get_arch_list()):  # sm_90a is code for sm_90
            found.append(f"This torch has no code for sm_{major}{minor}, only for {torch.cuda.get_arch_list()}.")
        if torch.cuda.device_count() > 1:
            found.append(f"{torch.cuda.device_count()} GPUs: only the first is used.")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        found.append(f"{sys.platform} on {platform.machine()}: the host tier is written for Linux.")
    return found


def locked_gib() -> float:
    """Return the largest host pool, in GiB, that CUDA page-locks; a power of two."""
    from omniserve.host.memory import allocate_pool

    largest, gib = 0.0, 1.0
    while gib <= min(64.0, available_bytes() / 2**31):
        try:
            allocate_pool((int(gib * 2**30),), torch.uint8, pin_memory=True)
        except RuntimeError:
            if not largest:
                raise
            break
        largest, gib = gib, 4 * gib
    return largest
