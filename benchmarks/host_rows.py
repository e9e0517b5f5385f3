"""Host attention for several consecutive tokens of a request in one task, over the time for one.

    python -m benchmarks.host_rows --record benchmarks/results/host_rows.json
    OMNISERVE_ISA=avx2 python -m benchmarks.host_rows --rows 1 2 4 --pools bf16

A shape is query heads / KV heads / head size; a pool is fp32, bf16, or int8 under bf16 rows. A sample is the time from
the submission of a task of each request until all have answered, at the next one of some layers, which no cache holds
together. Numbers of rows take turns. Cells are milliseconds, medians, and in brackets the median of the ratios to the
first column's sample of the same turn. Tasks of one token each, one after the other, would take as many times as long
as there are rows.

Give the machine nothing else to do; the record has how many cores other processes took meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from typing import Any

import torch

from benchmarks.common.bandwidth import allowed_cpus, fill, normal_tile
from benchmarks.common.host_tasks import seconds_of_tasks
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table
from benchmarks.common.timing import OtherLoad, in_turn, median_ratio
from omniserve.core.setup import HostTierSetup
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.host.tier import HostTier
from omniserve.ops.isa import instruction_set_in_use

BLOCK_SIZE = 16
POOLS = {"fp32": (torch.float32, "auto"), "bf16": (torch.bfloat16, "auto"), "int8": (torch.bfloat16, "int8")}


class Tasks:
    """Requests of one length on a host tier, as many layers as fill `cold_bytes`, and rows for them."""

    def __init__(self, shape: str, pool: str, requests: int, context: int, max_rows: int, cold_bytes: int) -> None:
        num_heads, kv_heads, head_size = (int(part) for part in shape.split("/"))
        dtype, kv_dtype = POOLS[pool]
        blocks_each = -(-context // BLOCK_SIZE)
        num_blocks, cpus = requests * blocks_each, allowed_cpus()

        def spec_of(num_layers: int) -> ModelSpec:
            return ModelSpec(
                num_layers=num_layers, hidden_size=num_heads * head_size, num_heads=num_heads, num_kv_heads=kv_heads,
                head_size=head_size, vocab_size=1, max_model_len=context, eos_token_ids=(), dtype_bytes=dtype.itemsize,
                attention=(AttentionSpec(scale=head_size**-0.5),) * num_layers,
            )  # fmt: skip

        layer_bytes = num_blocks * spec_of(1).host_block_bytes(BLOCK_SIZE, kv_dtype)
        self.num_layers = max(1, -(-cold_bytes // layer_bytes))
        self._context, self._layers = context, itertools.cycle(range(self.num_layers))
        setup = HostTierSetup(
            block_size=BLOCK_SIZE, kv_bytes=self.num_layers * layer_bytes, kv_dtype=kv_dtype, num_slots=requests,
            max_rows=max_rows, num_threads=len(cpus), cores=tuple(cpus),
        )  # fmt: skip
        self._tier = HostTier(setup, spec=spec_of(self.num_layers), dtype=dtype)
        if self._tier.scales_LBK2S is None:
            fill(self._tier.pool_LBK2SH, normal_tile(dtype, 0), len(cpus))
        else:
            fill(self._tier.pool_LBK2SH, torch.randint(-127, 128, (1 << 20,), dtype=torch.int8), len(cpus))
            self._tier.scales_LBK2S.fill_(0.02)
        self._blocks = torch.randperm(num_blocks).view(requests, blocks_each).tolist()
        self._q, self._k = (
            torch.randn(requests * max_rows, heads, head_size).to(dtype) for heads in (num_heads, kv_heads)
        )

    def seconds(self, num_rows: int) -> float:
        """Run a task of `num_rows` tokens for each request, the last `num_rows` of its context."""
        layer, count = next(self._layers), len(self._blocks) * num_rows
        for slot, blocks in enumerate(self._blocks):
            self._tier.begin_token(slot, 0, self._context - num_rows, blocks, num_rows)
        slots = torch.arange(len(self._blocks)).repeat_interleave(num_rows)
        q, k = self._q[:count], self._k[:count]
        return seconds_of_tasks(self._tier, len(self._blocks), layer, slots, q, k, k)

    def close(self) -> None:
        self._tier.close()


def measure(tasks: Tasks, rows: list[int], repeats: int) -> dict[str, Any]:
    """Return, by number of rows, the seconds of each sample."""
    load = OtherLoad()
    calls = {str(count): functools.partial(tasks.seconds, count) for count in rows}
    return {"layers": tasks.num_layers, "seconds": in_turn(calls, repeats), "others_busy_cores": load.cores()}


def cells(seconds: dict[str, list[float]]) -> list[str]:
    """Return a line's times and ratios."""
    one = next(iter(seconds.values()))
    return [f"{statistics.median(times) * 1e3:.2f} ({median_ratio(times, one):.2f})" for times in seconds.values()]


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(
        __doc__, "host_rows", shapes=["32/8/128", "32/32/128", "9/3/64"], pools=["bf16", "fp32", "int8"],
        rows=([1, 2, 4, 8], "tokens of a task; the first is what the others are compared with"),
        requests=4, context=2048, repeats=15, cold_mib=(512, "of K and V"),
    )  # fmt: skip
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    lines = [["heads, pool", *(f"rows: {count}" for count in args.rows)]]
    for shape, pool in itertools.product(args.shapes, args.pools):
        tasks = Tasks(shape, pool, args.requests, args.context, max(args.rows), args.cold_mib << 20)
        try:
            results[f"{shape} {pool}"] = measured = measure(tasks, args.rows, args.repeats)
        finally:
            tasks.close()
        lines.append([f"{shape} {pool}", *cells(measured["seconds"])])
    isa = instruction_set_in_use()
    print(f"\n{isa}, {len(allowed_cpus())} threads, ms\n\n{table(lines, numbers=True)}", flush=True)
    write_record(
        args.record, name="host_rows", config=vars(args) | {"isa": isa, "cpus": allowed_cpus()}, seed=0, results=results
    )


if __name__ == "__main__":
    main()
