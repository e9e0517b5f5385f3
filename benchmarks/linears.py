"""Dense products on the CPU device tier: packed weights here, oneDNN's packed ones and torch's own, beside the floor.

    python -m benchmarks.linears --record benchmarks/results/linears.json
    OMNISERVE_ISA=avx2 python -m benchmarks.linears --shapes 576x3072 --dtypes bfloat16 float32

A shape is inputs x outputs. Contenders take turns; a sample is the mean of some calls, each with a weight that no cache
holds any more, in huge pages for all. Cells are medians, in microseconds, and in brackets how many times the floor that
is: the larger of reading the weight at the speed at which all threads read memory, and of its arithmetic at the rate of
the fastest matrix product that torch has here, in any dtype. Both are measured again with each number of rows.
`pairs` is the median of the ratios of neighbouring samples, here by oneDNN: below 1, packed here is faster.

Give the machine nothing else to do; OMNISERVE_ISA forces an instruction set on the kernels here, not on the others.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.bandwidth import Arena, allowed_cpus
from benchmarks.common.machine_speed import MachineSpeed, SpeedMeter, available_products
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table
from benchmarks.common.timing import OtherLoad, in_turn, median_ratio, seconds
from omniserve.layers.weights.packed import PackedLinear, pack
from omniserve.ops.isa import instruction_set_in_use

OURS, ONEDNN, TORCH = "packed here", "oneDNN packed", "torch"
SAMPLE_S = 0.02
Product = Callable[[torch.Tensor, torch.Tensor], object]


def weights_of(num_in: int, num_out: int, dtype: torch.dtype, cold_bytes: int) -> dict[str, list[torch.Tensor]]:
    """Return, by contender, copies of one random weight that together are larger than ``cold_bytes``."""
    dense = torch.randn(num_out, num_in).to(dtype) / num_in**0.5
    linear = nn.Linear(num_in, num_out, bias=False, dtype=dtype)
    linear.weight.data = dense
    pack(linear)
    count = -(-cold_bytes // dense.nbytes)
    weights = {OURS: _copies(cast(PackedLinear, linear).group_weight, count), TORCH: _copies(dense, count)}
    if dtype == torch.float32 or "bf16 packed" in available_products():
        weights[ONEDNN] = [torch.ops.mkldnn._reorder_linear_weight(dense, None) for _ in range(count)]
    return weights


def _copies(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    size = -(-tensor.nbytes // 4096) * 4096
    memory = Arena(size * count).bytes
    parts = [memory[size * i : size * i + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for i in range(count)]
    for part in parts:
        part.copy_(tensor)
    return parts


def products(num_out: int) -> dict[str, Product]:
    """Return each contender's product of rows and a weight of its own."""
    return {
        OURS: lambda x, weight: torch.ops.omniserve.packed_linear(x, weight, None, num_out),
        ONEDNN: lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
        TORCH: functional.linear,
    }


def measure(
    shape: tuple[int, int], dtype: torch.dtype, rows: list[int], meter: SpeedMeter, *, repeats: int, cold_bytes: int
) -> dict[str, Any]:
    """Return a shape's speeds and, by number of rows, each contender's seconds, one a sample."""
    num_in, num_out = shape
    weights = weights_of(num_in, num_out, dtype, cold_bytes)
    streams = {name: itertools.cycle(copies) for name, copies in weights.items()}
    load, speeds, by_rows = OtherLoad(), [], {}
    for count in rows:
        speeds.append(meter.sample())
        x = torch.randn(count, num_in).to(dtype)
        calls = {
            name: _sample(product, x, streams[name]) for name, product in products(num_out).items() if name in streams
        }
        by_rows[count] = in_turn(calls, repeats)
    speed = MachineSpeed(
        bytes_per_s=statistics.median(each.bytes_per_s for each in speeds),
        flop_per_s=statistics.median(each.flop_per_s for each in speeds),
    )
    return {"speed": speed, "others_busy_cores": load.cores(), "seconds": by_rows}


def _sample(product: Product, x: torch.Tensor, weights: Iterator[torch.Tensor]) -> Callable[[], float]:
    """Return what measures a sample: a product's mean seconds over as many cold weights as fill some time."""
    product(x, next(weights))
    calls = max(1, round(SAMPLE_S / seconds(lambda: product(x, next(weights)))))

    def run() -> None:
        for _ in range(calls):
            product(x, next(weights))

    return lambda: seconds(run) / calls


def floor_s(shape: tuple[int, int], dtype: torch.dtype, rows: int, speed: MachineSpeed) -> float:
    """Return the least seconds of a product."""
    values = shape[0] * shape[1]
    return max(values * dtype.itemsize / speed.bytes_per_s, 2 * values * rows / speed.flop_per_s)


def lines(shape: tuple[int, int], dtype: torch.dtype, results: dict[str, Any]) -> str:
    """Return a shape's table."""
    head = ["rows", "floor", OURS, ONEDNN, "pairs", TORCH]
    body = []
    for rows, samples in results["seconds"].items():
        floor = floor_s(shape, dtype, rows, results["speed"])
        cells = {
            name: f"{statistics.median(times) * 1e6:,.0f} ({statistics.median(times) / floor:.2f})"
            for name, times in samples.items()
        }
        pairs = f"{median_ratio(samples[OURS], samples[ONEDNN]):.2f}" if ONEDNN in samples else ""
        body.append([str(rows), f"{floor * 1e6:,.0f}", cells[OURS], cells.get(ONEDNN, ""), pairs, cells[TORCH]])
    return table([head, *body], numbers=True)


def _shape(text: str) -> tuple[int, int]:
    num_in, _, num_out = text.partition("x")
    return int(num_in), int(num_out)


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(
        __doc__, "linears", shapes=["576x960", "576x3072", "1536x576", "2048x5632"], dtypes=["bfloat16"],
        rows=[1, 4, 8, 16, 32, 128, 512], repeats=9, cold_mib=(1024, "of weights of each contender"),
    )  # fmt: skip
    args = parser.parse_args()
    cpus = allowed_cpus()
    meter = SpeedMeter(cpus)
    results: dict[str, Any] = {}
    for text, name in itertools.product(args.shapes, args.dtypes):
        shape, dtype = _shape(text), getattr(torch, name)
        results[f"{text} {name}"] = measured = measure(
            shape, dtype, args.rows, meter, repeats=args.repeats, cold_bytes=args.cold_mib << 20
        )
        speed = measured["speed"]
        print(
            f"\n{text}, {name}, us; read {speed.bytes_per_s / 1e9:.1f} GB/s, products {speed.flop_per_s / 1e9:,.0f} "
            f"GFLOP/s, others {measured['others_busy_cores']:.2f} cores\n\n{lines(shape, dtype, measured)}",
            flush=True,
        )
    config = vars(args) | {"cpus": cpus, "instruction_set": instruction_set_in_use()}
    config |= {name: os.environ.get(name) for name in ENVIRONMENT}
    write_record(args.record, name="linears", config=config, seed=0, results=results)


ENVIRONMENT = {"GOMP_SPINCOUNT": "10000", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment variables that libgomp and malloc read at start: as in the Makefile, and huge pages for oneDNN's
weights."""

if __name__ == "__main__":
    if missing := {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}:
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.linears", *sys.argv[1:]], os.environ | missing)
    main()
