"""The rates that all other figures are compared with (``limits``), each as a case."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.script import Script


def limits(script: Script) -> None:
    """Record all limits of the hardware."""
    found = script.limits
    rates: dict[str, tuple[Callable[[], float], float, str]] = {
        "copy inside device memory, read + written": (lambda: found.copy_bytes_per_s, 1e-9, "GB/s"),
        "bf16 matrix product": (lambda: found.matmul_flops, 1e-12, "TFLOP/s"),
        "PCIe to the device, page-locked, one piece": (lambda: found.to_device_bytes_per_s, 1e-9, "GB/s"),
        "PCIe to the host, page-locked, one piece": (lambda: found.to_host_bytes_per_s, 1e-9, "GB/s"),
        "small kernel, launched from Python": (lambda: found.launch_s(in_graph=False), 1e6, "us"),
        "small kernel, in a CUDA graph": (lambda: found.launch_s(in_graph=True), 1e6, "us"),
        f"main memory, read by {found.host_threads} threads": (lambda: found.host_read_bytes_per_s, 1e-9, "GB/s"),
    }
    for name, (measure, factor, unit) in rates.items():
        with script.case(name) as case:
            case.figure(factor * measure(), unit)
