"""What this machine is, what of it is not supported, and whether the C++ extension loads."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.attention.bandwidth import available_bytes
from benchmarks.common.record import environment
from benchmarks.gpu.script import NO_GPU, NotHere, Script, argument_parser

_FIELDS = (
    "name,compute_cap,driver_version,memory.total,memory.used,clocks.max.sm,clocks.max.mem,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,mig.mode.current,compute_mode"
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    script = Script("machine", argument_parser(__doc__).parse_args(arguments))
    with script.case("nvidia-smi") as case:
        case.details |= nvidia_smi()
        case.note = ", ".join(f"{key} {value}" for key, value in case.details.items())
    with script.case("versions") as case:
        capability = torch.cuda.get_device_capability() if script.on_gpu else None
        case.details |= {
            **environment()["versions"], "torch_cuda": torch.version.cuda, "capability": capability,
            "architectures": torch.cuda.get_arch_list() if script.on_gpu else [],
        }  # fmt: skip
        case.note = ", ".join(f"{key} {value}" for key, value in case.details.items() if value)
    with script.case("supported") as case:
        case.details["sentences"] = problems = unsupported(script)
        if problems and not script.dry:
            raise RuntimeError(" ".join(problems))
        case.note = " ".join(problems) or "nothing here is known to be unsupported"
    with script.case("main memory and cores") as case:
        nodes = [*Path("/sys/devices/system/node").glob("node[0-9]*")]
        case.details |= {
            "cores": len(os.sched_getaffinity(0)), "numa_nodes": len(nodes),
            "free_gib": round(available_bytes() / _GIB, 1),
            "huge_pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "unknown",
            "locked_memory_limit_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        }  # fmt: skip
        case.note = ", ".join(f"{key} {value}" for key, value in case.details.items())
    with script.case("the extension loads") as case:
        import omniserve.ops

        case.note = f"{len(omniserve.ops.OPS)} operators"
    with script.case("page-locked memory, as the host pool takes it") as case:
        if not script.on_gpu:
            raise NotHere("needs a GPU")
        case.note = f"{locked_gib():g} GiB in one piece (tried up to 64, or half of what is free)"
    status = script.end()
    return status if script.on_gpu or script.dry else NO_GPU


def nvidia_smi() -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU.

    Raises:
        NotHere: There is none, or it says nothing.
    """
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHere(f"nvidia-smi does not run: {error}") from error
    if done.returncode != 0 or not done.stdout.strip():
        raise NotHere(f"nvidia-smi ended with status {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}")
    return dict(zip(_FIELDS.split(","), done.stdout.splitlines()[0].split(", "), strict=False))


def unsupported(script: Script) -> list[str]:
    """Return what of this machine does not work with OmniServe, in sentences."""
    found = []
    if torch.version.cuda is None:
        found.append(f"torch {torch.__version__} is a build without CUDA: install one with it.")
    elif not script.on_gpu:
        found.append(f"torch is built for CUDA {torch.version.cuda} but finds no GPU that it can use: {why_no_cuda()}.")
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


def why_no_cuda() -> str:
    """Return torch's own words on why there is no CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return "torch.cuda.is_available() is False"


def locked_gib() -> float:
    """Return the largest host pool, in GiB, that CUDA page-locks; a power of two.

    Raises:
        RuntimeError: Not even the smallest.
    """
    from omniserve.host.memory import allocate_pool

    largest, gib = 0.0, 1.0
    while gib <= min(64.0, available_bytes() / 2 / _GIB):
        try:
            allocate_pool((int(gib * _GIB),), torch.uint8, pin_memory=True)
        except RuntimeError:
            if not largest:
                raise
            break
        largest, gib = gib, 4 * gib
    return largest


if __name__ == "__main__":
    sys.exit(main())
