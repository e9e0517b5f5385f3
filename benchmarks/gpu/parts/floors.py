"""What the hardware allows: memory, matrix unit, PCIe, launches, main memory."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    """Measure all limits that other parts compare with."""
    limits = bench.limits
    bench.take("copy inside device memory, read + written", "GB/s", lambda: limits.copy_bytes_per_s / 1e9)
    bench.take("bf16 matrix product", "TFLOP/s", lambda: limits.matmul_flops / 1e12)
    bench.take("PCIe to the device, page-locked, one piece", "GB/s", lambda: limits.to_device_bytes_per_s / 1e9)
    bench.take("PCIe to the host, page-locked, one piece", "GB/s", lambda: limits.to_host_bytes_per_s / 1e9)
    bench.take("small kernel, launched from Python", "us", lambda: 1e6 * limits.launch_s)
    bench.take("small kernel, in a CUDA graph", "us", lambda: 1e6 * limits.graph_launch_s)
    threads = f"main memory, read by {limits.host_threads} threads"
    bench.take(threads, "GB/s", lambda: limits.host_read_bytes_per_s / 1e9)
