"""What the hardware allows: memory, matrix unit, PCIe, launches, main memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.gpu.script import Script, argument_parser


def main(arguments: Sequence[str] | None = None) -> int:
    script = Script("limits", argument_parser(__doc__).parse_args(arguments))
    limits = script.limits
    with script.case("copy inside device memory, read + written") as case:
        case.figure(limits.copy_bytes_per_s / 1e9, "GB/s")
    with script.case("bf16 matrix product") as case:
        case.figure(limits.matmul_flops / 1e12, "TFLOP/s")
    with script.case("PCIe to the device, page-locked, one piece") as case:
        case.figure(limits.to_device_bytes_per_s / 1e9, "GB/s")
    with script.case("PCIe to the host, page-locked, one piece") as case:
        case.figure(limits.to_host_bytes_per_s / 1e9, "GB/s")
    with script.case("small kernel, launched from Python") as case:
        case.figure(1e6 * limits.launch_s, "us")
    with script.case("small kernel, in a CUDA graph") as case:
        case.figure(1e6 * limits.graph_launch_s, "us")
    with script.case(f"main memory, read by {limits.host_threads} threads") as case:
        case.figure(limits.host_read_bytes_per_s / 1e9, "GB/s")
    return script.end()


if __name__ == "__main__":
    sys.exit(main())
